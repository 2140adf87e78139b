"""A small part of what checkpoints.py does by hand."""

from .checkpoints import damage


def test_damaged_files_are_refused(tmp_path):
    assert damage(40, 0, tmp_path) == {"refused": 40}
