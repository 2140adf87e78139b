"""Analyse attention: spectra, distance from the KSVD, how many directions a layer needs."""

from primal_attention.analysis.capture import attention_matrices
from primal_attention.analysis.duality import Duality, duality
from primal_attention.analysis.figures import figure1, plot_spectra
from primal_attention.analysis.spectrum import Spectrum, spectrum
from primal_attention.analysis.suggestion import Suggestion, suggest_directions

__all__ = [
    "Duality",
    "Spectrum",
    "Suggestion",
    "attention_matrices",
    "duality",
    "figure1",
    "plot_spectra",
    "spectrum",
    "suggest_directions",
]
