"""In Triton's interpreter all addresses of all ops are checked."""

from contextlib import nullcontext

import pytest


@pytest.fixture(autouse=True, scope="session")
def addresses_inside_tensors():
    try:
        import triton
    except ImportError:
        context = nullcontext()
    else:
        from .bounds import addresses_checked

        context = addresses_checked() if triton.knobs.runtime.interpret else nullcontext()
    with context:
        yield
