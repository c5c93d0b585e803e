"""What Azure has in the tier Premium only, as .NET's SDK tells it, on a broker with sku = "standard"."""

from pathlib import Path

import pytest

from tests.caller import REQUIRE_INTEROP
from tests.interop import harness
from tests.interop.scenario import Scenario
from tests.interop.sdks import PROGRAMS
from tests.interop.test_interop import ensure

pytestmark = pytest.mark.interop

REFUSED = Scenario("session-take-over-refused", "Sessions that are not exclusive are not supported.", ())


def test_sessions_that_are_not_exclusive_are_not_supported(tmp_path: Path) -> None:
    ensure(PROGRAMS["dotnet"].toolchain)
    config = (
        f'sku = "standard"\n{harness.rule(harness.LISTENER, "Listen")}{harness.rule(harness.SENDER, "Send")}'
        f'[[queues]]\nname = "{REFUSED.entity}"\nrequires_session = true\n'
    )
    try:
        secure = harness.SecureBroker(tmp_path, config)
    except harness.CannotListen as error:
        pytest.fail(str(error)) if REQUIRE_INTEROP else pytest.skip(str(error))
    with secure as broker:
        result = harness.run(PROGRAMS["dotnet"], broker, [REFUSED.id], partitioned=False)[REFUSED.id]
        assert result.ok, f"{result.detail}\n{broker.log()}"
