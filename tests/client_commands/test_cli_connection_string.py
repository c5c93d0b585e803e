"""`peeklock connection-string` beside a broker, and without one."""

import re
import subprocess
import sys

from tests.brokers import REPOSITORY
from tests.patience import PATIENCE_S
from tests.ports import free_ports


def test_the_connection_string_has_the_port_in_use_and_an_entitys_own_key(tmp_path):
    rule = '[[queues.authorization_rules]]\nkey_name = "app"\nprimary_key = "own-key"\nrights = ["Send"]\n'
    config = f'[amqp]\nport = 0\n[http]\nport = 0\n[[queues]]\nname = "orders"\n{rule}'
    (tmp_path / "config.toml").write_text(config)
    options = ["--config", str(tmp_path / "config.toml"), "--data-dir", str(tmp_path / "data")]

    def printed(*more, fails_with=None):
        command = [sys.executable, "-m", "broker.cli", "connection-string", *options, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY)
        assert done.returncode == (0 if fails_with is None else 78), done.stderr
        assert (fails_with or "") in done.stderr
        return done.stdout.strip()

    assert printed(fails_with="there is no root key yet") == ""
    assert printed("--entity", "orders", "--key-name", "app", fails_with="amqp.port is 0") == ""
    (ops_port,) = free_ports(1)
    serve = [sys.executable, "-m", "broker.cli", "serve", *options, "--ops-port", str(ops_port)]
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as broker:
        try:
            said = ""
            while "Connection string" not in said:
                said += broker.stdout.readline()
            port = int(re.search(r"amqp://127\.0\.0\.1:(\d+)", said)[1])
            of_entity = printed("--entity", "Orders", "--key-name", "app")
            assert of_entity == (
                f"Endpoint=sb://localhost:{port};SharedAccessKeyName=app;SharedAccessKey=own-key;"
                "UseDevelopmentEmulator=true;EntityPath=Orders;"
            )
            root = printed("--entity", "orders")
            assert f"SharedAccessKey={(tmp_path / 'data/root-key').read_text().strip()};" in root
            assert root.startswith(printed())
            assert printed("--entity", "none", fails_with="'none': ") == ""
            assert printed("--entity", "orders", "--key-name", "x", fails_with="its own are: app") == ""
        finally:
            broker.terminate()
            assert broker.wait(PATIENCE_S) == 0
    assert printed(fails_with="amqp.port is 0") == ""
