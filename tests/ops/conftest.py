"""In Triton's interpreter all addresses of all ops are checked, and launches do nothing twice."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def interpreter():
    try:
        import triton
    except ImportError:
        yield
        return
    if not triton.knobs.runtime.interpret:
        yield
        return
    from .bounds import addresses_checked
    from .launches import prepared_once

    with addresses_checked(), prepared_once():
        yield
