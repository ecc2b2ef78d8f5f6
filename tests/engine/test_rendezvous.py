"""The bootstrap routes, and what strangers may do to the control port."""

import asyncio
import json

import msgspec
import pytest

from engine.pairs import call, pair, until
from tandem_engine.bootstrap import Bootstrap
from tandem_engine.config import Timeouts
from tandem_engine.wire import Abort, Announce, Registration, Renew, RoomMetadata, frame

TOPOLOGY = "/route?prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"
ROW = {"rank_ip": "127.0.0.1", "rank_port": 4711, "prefill_http_port": 30000}


class Client:
    """The bootstrap application without a socket."""

    def __init__(self) -> None:
        self.app = Bootstrap().app

    async def get(self, target):
        """GET."""
        return await call(self.app, "GET", target)

    async def send(self, method, target, value):
        """A JSON body."""
        return await call(self.app, method, target, json.dumps(value).encode())


class TestRoutes:
    async def test_the_topology_is_503_until_every_rank_is_there(self):
        """With two ranks, one registration is not enough."""
        client, rank = Client(), ROW | {"attn_tp_size": 2}
        before = await client.get(TOPOLOGY.format(-1))
        await client.send("PUT", "/route", rank | {"attn_tp_rank": 0})
        half = await client.get(TOPOLOGY.format(-1))
        await client.send("PUT", "/route", rank | {"attn_tp_rank": 1, "rank_port": 4712})
        whole = await client.get(TOPOLOGY.format(-1))

        assert (before.status, half.status, whole.status) == (503, 503, 200)
        assert whole.json["attn_tp_size"] == 2
        assert whole.json["follow_bootstrap_room"] is True
        assert whole.json["required_dst_info_num"] is None

    async def test_a_rank_query_gives_its_endpoint(self):
        """404 for a rank that is not there, 400 for a missing parameter."""
        client = Client()
        await client.send("PUT", "/route", ROW)
        found = await client.get(TOPOLOGY.format(0))

        assert found.json == {"rank_ip": "127.0.0.1", "rank_port": 4711}
        assert (await client.get(TOPOLOGY.format(3))).status == 404
        assert (await client.get("/route?prefill_dp_rank=0")).status == 400

    async def test_a_rank_that_does_not_fit_the_first_is_refused(self):
        """Layouts must agree; a broken body is a 400 too, another method a 405."""
        client = Client()
        await client.send("PUT", "/route", ROW)

        assert (await client.send("PUT", "/route", ROW | {"page_size": 16})).status == 400
        assert (await client.send("PUT", "/route", "x")).status == 400
        assert (await client.send("POST", "/route", ROW)).status == 405

    async def test_rooms_have_ranks(self):
        """Only known rooms are answered."""
        client = Client()
        await client.send("POST", "/register_dp_rank", {"bootstrap_room": 7, "dp_rank": 1})
        reply = await client.send("POST", "/query_dp_ranks", {"bootstrap_rooms": [7, 8]})
        wrong = await client.send("POST", "/query_dp_ranks", {"bootstrap_rooms": ["x"]})

        assert reply.json == {"7": 1}
        assert wrong.status == 400

    async def test_health_says_nothing(self):
        """200 before anything registered."""
        assert (await Client().get("/health")).status == 200


class TestControlPort:
    @pytest.mark.parametrize(
        "sent",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x00\x00\x00\x05hello",
            b"\x00\x00\x00\x00",
            b"\xff\xff\xff\xff",
            frame(Renew("stranger", 1)),
            frame(Announce("a", "d:1", 1.0, 3.0, "shm:/etc/passwd")) + frame(Renew("another", 1)),
        ],
        ids=["http", "not msgpack", "empty", "too long", "no announcement", "another's name"],
    )
    async def test_a_bad_frame_closes_that_connection_only(self, sent):
        """The thread lives on, and the pair serves as before."""
        async with pair() as two:
            reader, writer = await asyncio.open_connection("127.0.0.1", two.prefill._rank_port)
            writer.write(sent)
            async with asyncio.timeout(10):
                while await reader.read(1024):
                    pass
            writer.close()

            assert (await two.generate()).status == 200

    async def test_a_decode_that_connects_late_hears_what_ended_before(self):
        """A room that the prefill gave up while nobody was connected is told to whoever comes."""
        async with pair() as two:
            bad = {"input_ids": [1 << 20]} | two.meeting()
            assert (await two.post(two.prefill, "/generate", bad)).status == 400
            await two.prefill.turn()
            reader, writer = await asyncio.open_connection("127.0.0.1", two.prefill._rank_port)
            writer.write(frame(Announce("a", "d:1", 1.0, 3.0, "tcp:127.0.0.1:9")))
            seen = b""
            async with asyncio.timeout(10):
                while b"RoomFailed" not in seen:
                    seen += await reader.read(1024)
            writer.close()

        assert b"refused by the prefill" in seen

    async def test_a_prefill_that_is_found_late_hears_what_ended_before(self):
        """A room that ended at the decode before its prefill was reached is told once it is."""
        async with pair() as two:
            meeting = two.meeting()
            decode = two.decode.core.phase
            link = f"127.0.0.1:{meeting['bootstrap_port']}"
            wanted = []
            two.decode.core.role._links.want, want = wanted.append, two.decode.core.role._links.want
            body = {"text": "x", "rid": "gone"} | meeting
            asked = [
                asyncio.create_task(two.post(worker, "/generate", body))
                for worker in (two.prefill, two.decode)
            ]
            await until(lambda: decode.prealloc, two.decode)
            await until(lambda: two.prefill.rooms, two.prefill)
            two.decode.abort("gone", everything=False)
            await two.decode.turn()
            want(link)
            async with asyncio.timeout(5):
                prefill, _ = await asyncio.gather(*asked)

        assert wanted == [link]
        assert "decode-side abort" in prefill.text

    async def test_a_room_of_an_unknown_agent_is_refused(self):
        """Metadata of an agent whose landing could not be opened fails the room at once."""
        async with pair() as two:
            reader, writer = await asyncio.open_connection("127.0.0.1", two.prefill._rank_port)
            writer.write(frame(Announce("a", "d:1", 1.0, 3.0, "carrier-pigeon:7")))
            writer.write(frame(RoomMetadata("a", 99, 0, 1)))
            seen = b""
            async with asyncio.timeout(10):
                while b"RoomFailed" not in seen:
                    seen += await reader.read(1024)
            writer.close()

            assert b"unknown agent" in seen
            assert (await two.generate()).status == 200

    async def test_a_room_that_was_given_up_first_fails_when_its_request_comes(self):
        """An abort may overtake the request; the request is told at once."""
        async with pair() as two:
            await two.generate()
            meeting = two.meeting()
            agent = two.decode.core.role._links.agent
            link = f"127.0.0.1:{meeting['bootstrap_port']}"
            two.decode.core.role._links.send(link, Abort(agent, meeting["bootstrap_room"]))
            await until(
                lambda: two.prefill.core.role._handoffs.why_ended(meeting["bootstrap_room"]),
                two.prefill,
            )
            answer = await two.post(two.prefill, "/generate", {"text": "late"} | meeting)

        assert answer.status == 500
        assert "decode-side abort" in answer.json["error"]["message"]


class TestLinks:
    async def test_a_decode_finds_a_restarted_prefill_by_itself(self):
        """The link is lost at once and made again at the new endpoint without a request."""
        async with pair() as two:
            await two.generate()
            link = f"127.0.0.1:{two.prefill.settings.disaggregation_bootstrap_port}"
            await two.restart_prefill()
            await until(lambda: two.decode.core.role._links.up(link), two.decode)
            answers = await asyncio.gather(*(two.generate() for _ in range(4)))

        assert [answer.status for answer in answers] == [200] * 4

    async def test_a_prefill_that_is_nowhere_fails_the_request(self):
        """After all attempts the client gets SGLang's sentence."""
        async with pair(timeouts=Timeouts(heartbeat_s=0.01)) as two:
            body = {"text": "x", "bootstrap_host": "127.0.0.1", "bootstrap_port": 9}
            answer = await two.post(two.decode, "/generate", body | {"bootstrap_room": 5})

        assert answer.status == 500
        assert "Could not fetch prefill parallel info from 127.0.0.1:9" in answer.text

    @pytest.mark.parametrize("told", [{"rank_ip": "a..b"}, {"rank_ip": "a\x00b"}, {"rank_port": 0}])
    async def test_an_endpoint_that_is_none_fails_the_request(self, told):
        """A rendezvous that tells nonsense is a prefill that is not there, not a silent decode."""
        async with pair(timeouts=Timeouts(heartbeat_s=0.01)) as two:
            own = two.prefill._registration(two.prefill.model)
            two.prefill._bootstrap.register(msgspec.structs.replace(own, **told))
            answer = await two.post(two.decode, "/generate", {"text": "x"} | two.meeting())

        assert answer.status == 500
        assert "Could not fetch prefill parallel info" in answer.text


def test_a_registration_speaks_for_one_rank_by_default():
    """The engine's own registration is a single rank."""
    row = Registration(rank_ip="127.0.0.1", rank_port=1)

    assert (row.attn_tp_size, row.pp_size, row.attn_dp_size) == (1, 1, 1)
