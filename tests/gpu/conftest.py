"""Models, cases and a broker as the equality tests have them."""

from tests.equality.conftest import broker_url, cases_of, folder_of, reference_of

__all__ = ["broker_url", "cases_of", "folder_of", "reference_of"]
