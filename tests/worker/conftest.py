from tests.models.conftest import _one_thread, tied, untied

__all__ = ["_one_thread", "tied", "untied"]
