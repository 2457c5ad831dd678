"""Models that the tests of this folder share."""

import pytest

from tests.support.models.tiny_models import SavedModels


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> SavedModels:
    return SavedModels(tmp_path_factory.mktemp("models"))
