"""Film reviews as a text: split by film, their words, and their prepared file."""

import re

import numpy as np
import pytest

from primal_attention.tasks import find_language, language_task, lra_task, prepare_language
from primal_attention.tasks.language import load_language, part_of_film, read_reviews

from .lra.toy_files import write_imdb

FILMS = [f"tt{number:07}" for number in range(60)]


@pytest.fixture
def folder(tmp_path):
    """Sixty films with four reviews each, one in each folder."""
    films = {"neg": FILMS, "pos": FILMS[::-1]}
    write_imdb(tmp_path / "aclImdb", {"train": films, "test": films})
    return tmp_path


def words_of(corpus, part):
    return [corpus.vocabulary[number] for number in getattr(corpus, part)]


def test_no_film_is_in_two_parts_and_no_review_is_lost(folder):
    corpus = read_reviews(folder / "aclImdb", most_words=1000)
    found = {}
    for line in " ".join(words_of(corpus, "train")).split(" <eos>")[:-1]:
        found.setdefault(line.split()[0], []).append(line)
    assert set(found) == {film for film in FILMS if part_of_film(film) == "train"}
    assert {len(reviews) for reviews in found.values()} == {4}
    counts = [words_of(corpus, part).count("<eos>") for part in ("train", "valid", "test")]
    assert sum(counts) == 240
    assert counts == [
        4 * sum(part_of_film(film) == part for film in FILMS) for part in ("train", "valid", "test")
    ]


def test_the_parts_of_films_are_what_they_ever_were():
    parts = [part_of_film(f"tt{number:07}") for number in range(10_000)]
    assert part_of_film("tt0453418") == "train"
    assert [parts.count(part) for part in ("train", "valid", "test")] == [8036, 1017, 947]


def test_words_keep_their_case_and_lines_are_joined(folder):
    film = next(film for film in FILMS if part_of_film(film) == "train")
    number = FILMS.index(film)
    path = folder / "aclImdb" / "train" / "neg" / f"{number}_{number % 10}.txt"
    path.write_text("It's GOOD -- it's 10/10!<br /><br />Très bon", encoding="utf-8")
    corpus = read_reviews(folder / "aclImdb", most_words=1000)
    text = " ".join(words_of(corpus, "train"))
    assert "<eos> It's GOOD - - it's 10 / 10 ! Très bon <eos>" in f"<eos> {text}"


def test_a_text_of_two_films_is_taken_once(folder):
    first, second = FILMS[0], FILMS[1]
    assert part_of_film(first) != "valid"
    for number in (0, 1):
        path = folder / "aclImdb" / "train" / "neg" / f"{number}_{number}.txt"
        path.write_text("the very same words", encoding="utf-8")
    corpus = read_reviews(folder / "aclImdb", most_words=1000)
    texts = [" ".join(words_of(corpus, part)) for part in ("train", "valid", "test")]
    assert sum(text.count("the very same words") for text in texts) == 1, (first, second)


def test_the_vocabulary_is_bounded_and_frequent(folder):
    whole = read_reviews(folder / "aclImdb", most_words=1000)
    counts = {word: words_of(whole, "train").count(word) for word in whole.vocabulary}
    bounded = read_reviews(folder / "aclImdb", most_words=12)
    assert len(bounded.vocabulary) <= 12
    kept = set(bounded.vocabulary) - {"<eos>", "<unk>"}
    left_out = set(whole.vocabulary) - kept - {"<eos>", "<unk>"}
    assert min(counts[word] for word in kept) > max(counts[word] for word in left_out)
    sizes = [words_of(bounded, "train").count(word) for word in bounded.vocabulary]
    assert sizes == sorted(sizes, reverse=True)
    assert len(bounded.train) == len(whole.train)
    assert whole.train.dtype == np.uint16


def test_places_and_the_prepared_file(folder, tmp_path, monkeypatch):
    assert find_language("imdb", folder) == folder / "aclImdb"
    assert find_language("imdb", folder / "aclImdb") == folder / "aclImdb"
    monkeypatch.setenv("PRIMAL_DATA", str(folder / "data"))
    assert find_language("imdb") is None
    with pytest.raises(FileNotFoundError, match=r"imdb: no data.*aclImdb_v1\.tar\.gz"):
        load_language("imdb")
    (folder / "data" / "lra").mkdir(parents=True)
    (folder / "aclImdb").rename(folder / "data" / "lra" / "aclImdb")
    assert len(lra_task("text").train) == 120  # the same folder serves both
    path = prepare_language("imdb")
    assert path == folder / "data" / "language" / "imdb.npz" == find_language("imdb")
    plain, prepared = read_reviews(folder / "data" / "lra" / "aclImdb"), load_language("imdb")
    assert prepared.vocabulary == plain.vocabulary
    for one, other in zip(prepared.parts, plain.parts, strict=True):
        assert (one == other).all()
    task = language_task("imdb", num_tokens=23)
    assert task.name == "language/imdb" and task.sizes.vocab_size == len(plain.vocabulary)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda place: (place / "urls_pos.txt").write_text("one"), r"urls_pos\.txt has 1 lines"),
        (lambda place: (place / "pos" / "x.txt").write_text(""), "is not called <id>_<rating>"),
        (lambda place: (place / "pos" / "0_0.txt").write_bytes(b"\xff"), "has byte 255"),
        (lambda place: (place / "urls_neg.txt").write_bytes(b"\xc3"), "is not a text in UTF-8"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder, harm, message):
    harm(folder / "aclImdb" / "train")
    with pytest.raises(ValueError, match=message):
        load_language("imdb", folder)


def test_a_folder_without_films_for_a_part_is_refused(tmp_path):
    film = next(film for film in FILMS if part_of_film(film) == "train")
    films = {label: [film] for label in ("neg", "pos")}
    write_imdb(tmp_path / "aclImdb", {"train": films, "test": films})
    message = re.escape("none of its films is one of those to valid, test")
    with pytest.raises(ValueError, match=message):
        load_language("imdb", tmp_path)
