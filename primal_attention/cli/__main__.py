"""`python -m primal_attention.cli`, for torchrun and where scripts are not on the path."""

from primal_attention.cli import main

if __name__ == "__main__":
    main()
