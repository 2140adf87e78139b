"""In Triton's interpreter all addresses of all ops are checked, and nothing is done in vain."""

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
    from .launches import nothing_in_vain

    with addresses_checked(), nothing_in_vain():
        yield
