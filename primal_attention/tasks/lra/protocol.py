"""What differs between the published numbers of the Long Range Arena and a clean comparison."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LraProtocol:
    """How cases are read; the last line is for the model to follow.

    Attributes:
        zero_is_padding: A token 0 is masked whatever it is. In Image and Pathfinder it is a black
            pixel, so most of a Pathfinder image is masked. Otherwise images have no mask.
        text_validates_on_test: Text is selected on its test cases; otherwise on a stratified tenth
            of the training cases, which is held out. Every other task has cases of its own.
        pool_over_padding: The mean over the outputs of a sequence divides their sum, zero at
            padding, by the padded length; otherwise by the number of real tokens.
    """

    zero_is_padding: bool
    text_validates_on_test: bool
    pool_over_padding: bool


LRA_PROTOCOLS: dict[str, LraProtocol] = {
    "paper": LraProtocol(zero_is_padding=True, text_validates_on_test=True, pool_over_padding=True),
    "clean": LraProtocol(
        zero_is_padding=False, text_validates_on_test=False, pool_over_padding=False
    ),
}
"""``paper``: as released by the authors and by Nyströmformer before them."""
