"""A control group tells the unit and the container of a process, and nothing it does not say."""

import os

import pytest

from tandem.cgroups import Place, Service, place_in, place_of

ID = "d280ef1b0efba040658c2447839e87e524674790cfc8938491dd4267ca3c6755"

SEEN = [
    ("0::/system.slice/sglang-decode.service", Place(Service("sglang-decode.service"))),
    (
        "0::/system.slice/system-sglang.slice/sglang@1.service/worker",
        Place(Service("sglang@1.service")),
    ),
    (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/pd.service",
        Place(Service("pd.service", 1000)),
    ),
    ("0::/user.slice/user-1000.slice/user@1000.service/init.scope", Place()),
    ("0::/user.slice/user-0.slice/session-4.scope", Place()),
    (
        "9:name=systemd:/system.slice/a.service\n4:memory:/elsewhere/b.service\n0::/",
        Place(Service("a.service")),
    ),
    (f"0::/system.slice/docker-{ID}.scope", Place(None, ID)),
    (f"12:pids:/docker/{ID}\n1:name=systemd:/docker/{ID}", Place(None, ID)),
    (f"9:name=systemd:/libpod_parent/libpod-{ID}\n0::/libpod_parent/libpod-{ID}", Place(None, ID)),
    (f"0::/machine.slice/libpod-{ID}.scope/container", Place(None, ID)),
    (
        f"0::/system.slice/pd.service/libpod-payload-{ID}",
        Place(Service("pd.service"), ID),
    ),
    (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", Place(None, ID)),
    ("0::/", Place()),
    ("", Place()),
    ("nonsense", Place()),
    (f"0::/a/{ID}{ID}", Place()),
]


@pytest.mark.parametrize(("text", "place"), SEEN)
def test_a_path_tells_its_place(text, place):
    """The innermost service, whose systemd has it, and the engine's id of a container."""
    assert place_in(text) == place


def test_a_living_process_has_a_place_and_a_gone_one_none():
    """Whatever this machine says of this process; nothing is raised for one that is not there."""
    assert isinstance(place_of(os.getpid()), Place)
    assert place_of(2**30) == Place()
