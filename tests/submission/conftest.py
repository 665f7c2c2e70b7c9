from tests.export.conftest import exported

__all__ = ["exported"]
