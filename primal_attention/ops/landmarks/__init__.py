"""Landmarks: which tokens they are, and the weights that are sampled from them."""

from primal_attention.ops.landmarks.eager import Landmarks, choose_landmarks, sampled_weights

__all__ = ["Landmarks", "choose_landmarks", "sampled_weights"]
