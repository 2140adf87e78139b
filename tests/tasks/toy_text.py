"""A text of few words, in which a word mostly tells the next."""

import numpy as np

WORDS = ("a", "b", "c", "d", "e", "f", "g")
PARTS = ("train", "valid", "test")


def make_line(rng, length):
    """From each word to the next of the alphabet, one time in ten to any."""
    places = [rng.integers(len(WORDS))]
    for _ in range(length - 1):
        anywhere = rng.random() < 0.1
        places.append(rng.integers(len(WORDS)) if anywhere else (places[-1] + 1) % len(WORDS))
    return " ".join(WORDS[place] for place in places)


def write_text(folder, lines=(97, 13, 11)):
    """The three files, with blanks at the ends of lines as in the originals."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, count in zip(PARTS, lines, strict=True):
        made = [make_line(rng, rng.integers(5, 18)) for _ in range(count)]
        (folder / f"wiki.{part}.tokens").write_text("".join(f" {line} \n" for line in made))
    return folder
