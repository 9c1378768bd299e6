import pytest
import rank_pool


@pytest.fixture(scope="session")
def _pools():
    pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def two(_pools):
    """Two ranks that all tests of a process share."""
    return _pools.get(2) or _pools.setdefault(2, rank_pool.Pool(2))


@pytest.fixture
def three(_pools):
    return _pools.get(3) or _pools.setdefault(3, rank_pool.Pool(3))


@pytest.fixture
def own_pool():
    """Ranks of a test's own: to be killed, or left out of step."""
    pools = []

    def start(count):
        pools.append(rank_pool.Pool(count))
        return pools[-1]

    yield start
    for pool in pools:
        pool.kill()
