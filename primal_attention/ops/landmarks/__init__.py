"""The landmarks X' of f(X): M tokens taken evenly from the real tokens of each sequence."""

from primal_attention.ops.landmarks.choice import Landmarks, choose_landmarks, landmarks

__all__ = ["Landmarks", "choose_landmarks", "landmarks"]
