"""The mechanisms that both papers compare with, one file each."""
