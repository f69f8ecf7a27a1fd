"""gloo and NCCL use the interface that carries the node's Ray address."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from vlatune.config.settings import RunConfig
from vlatune.train.driver.ray_trainer import interface_variables, make_trainer

ADDRESSES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.12", "fe80::1%eth0", "12:34:56:78:9a:bc"],
    "eth1": ["10.0.0.1", "fd00::7"],
}


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.0.0.1", "eth1"), ("10.0.0.12", "eth0"), ("fd00::7", "eth1"), ("fe80::1", "eth0"), ("127.0.0.1", "lo")],
)
def test_interface_with_the_address_is_used(address, interface):
    expected = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    assert interface_variables(address, ADDRESSES) == expected


def test_address_of_no_interface_leaves_the_choice_to_the_libraries():
    assert interface_variables("192.0.2.1", ADDRESSES) == {}


def test_loopback_interface_of_this_machine_is_found():
    addresses = {name: [one.address for one in own] for name, own in psutil.net_if_addrs().items()}
    name = interface_variables("127.0.0.1", addresses)["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in addresses[name]


@pytest.mark.parametrize("is_local", [True, False])
def test_thread_settings_of_the_driver_reach_workers_of_any_cluster(monkeypatch, is_local):
    """Workers of a local cluster inherit them from the process that started it."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "secret")
    job: Any = SimpleNamespace(config=RunConfig(), num_workers=1)
    trainer = make_trainer(job, None, resources={"CPU": 1}, is_local=is_local, name="attempt")
    sent = trainer.run_config.worker_runtime_env.get("env_vars", {})
    assert "HF_TOKEN" not in sent
    wanted = {"OMP_WAIT_POLICY": "PASSIVE", "NCCL_DEBUG": "WARN"}
    assert {name: sent.get(name) for name in wanted} == (dict.fromkeys(wanted) if is_local else wanted)
