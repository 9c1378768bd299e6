import pytest


@pytest.fixture(scope="session")
def _cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch, tmp_path, _cache):
    """Neither the cache nor the data folder of whoever runs the tests is touched."""
    monkeypatch.setenv("ZETACLIP_CACHE", str(_cache))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
