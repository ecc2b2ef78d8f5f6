"""What systemd is told, over real sockets."""

import contextlib
import socket

import pytest

from tandem.service.notify import STATUS_CHARACTERS, VARIABLES, Notifier, status


@contextlib.contextmanager
def listening(address):
    """Listen as systemd does; gives what has arrived."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if address.startswith("@") else address)
        manager.setblocking(False)

        def heard():
            with contextlib.suppress(BlockingIOError):
                return manager.recv(4096).decode().split("\n")
            return None

        yield heard


class TestSending:
    """Datagrams of `sd_notify`."""

    @pytest.mark.parametrize("kind", ["path", "abstract"])
    def test_what_is_sent_arrives_as_one_datagram(self, kind, tmp_path):
        """By a path and by an abstract name, several assignments arrive together."""
        address = str(tmp_path / "notify") if kind == "path" else f"@tandem-{tmp_path.name}"
        with listening(address) as heard:
            sent = Notifier(address).send("READY=1", "WATCHDOG=1")

            assert (sent, heard()) == (True, ["READY=1", "WATCHDOG=1"])
            assert heard() is None

    @pytest.mark.parametrize("address", [None, "", "@", "/", "vsock:2:1", "relative"])
    def test_without_a_socket_nothing_is_sent(self, address):
        """No address, and none that is a Unix socket's, is no error."""
        assert Notifier(address).send("READY=1") is False

    @pytest.mark.parametrize("address", ["/nowhere/notify", "@nobody-listens", "/" + "x" * 300])
    def test_a_manager_that_is_away_is_no_error(self, address):
        """A socket nobody has, or nobody could have, costs the message and nothing else."""
        assert Notifier(address).send("WATCHDOG=1") is False

    def test_a_manager_that_reads_nothing_is_not_waited_for(self, tmp_path):
        """Once its queue is full, messages are lost at once."""
        with listening(str(tmp_path / "notify")):
            notifier = Notifier(str(tmp_path / "notify"))
            taken = [notifier.send("WATCHDOG=1") for _ in range(2000)]

        assert (taken[0], taken[-1]) == (True, False)


class TestEnvironment:
    """Where the address comes from."""

    def test_our_children_do_not_inherit_it(self, tmp_path):
        """The variables of the service manager are taken out of the environment."""
        environment = {"NOTIFY_SOCKET": str(tmp_path / "s"), "WATCHDOG_USEC": "1", "PATH": "/bin"}
        notifier = Notifier.of(environment)

        assert notifier.listened_to
        assert not set(VARIABLES) & set(environment)
        assert environment == {"PATH": "/bin"}

    def test_outside_a_service_nobody_listens(self):
        """Without the variable there is nobody."""
        assert not Notifier.of({}).listened_to


class TestStatus:
    """The line that `systemctl status` shows."""

    def test_it_is_one_bounded_line_of_visible_text(self):
        """What is found is told as one line, whatever is in a name, and never as an assignment."""
        said = status("laptop: found\nMAINPID=1\x1b[31m" + "x" * 1000)

        assert said.startswith("STATUS=laptop: found MAINPID=1x")
        assert "\n" not in said
        assert len(said) == len("STATUS=") + STATUS_CHARACTERS
