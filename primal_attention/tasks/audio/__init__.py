"""Raw sound: clips as sequences of samples."""

from primal_attention.tasks.audio.sets import SOUNDS
from primal_attention.tasks.audio.task import SOUND_AUGMENTATIONS, audio_task

__all__ = ["SOUNDS", "SOUND_AUGMENTATIONS", "audio_task"]
