"""The ledger writes a row for every life that begins or ends, and for what it was started with."""

import pytest

from tandem.collect import Ledger
from tandem.collect.changes import Known, flags, known_from
from tandem.facts import Facts
from tandem.ports import Harvest
from tandem.records import Change, Deployment, Observation, Trait
from tandem.records import vocabulary as v

OLD = ("python", "-m", "sglang.launch_server", "--port", "30000", "--cuda-graph-max-bs", "32")
NEW = (*OLD[:-1], "96", "--disable-overlap-schedule")


def seen(name, value, label="", life="1:a", at=1000.0, **more):
    return Observation(
        source="process",
        subject="decode-0",
        name=name,
        at=at,
        label=label,
        value=value,
        incarnation=life,
        **more,
    )


def life(name, started_at=900.0, argv=OLD, env=(), args=(), at=1000.0):
    """Everything that is seen of one life at once."""
    variables = dict(env) or {"": None}
    return Harvest(
        (
            seen(v.ALIVE, value=True, life=name, at=at),
            seen(v.STARTED_AT, started_at, life=name, at=at),
            seen(v.COMMAND_LINE, argv, life=name, at=at),
            *(
                seen(v.ENVIRONMENT, text, label, life=name, at=at)
                for label, text in variables.items()
            ),
            *(
                seen(v.SERVER_ARG, text, label, life=name, at=at)
                for label, text in dict(args).items()
            ),
        )
    )


def facts_of(rows):
    return [(row.kind, row.what, row.before, row.after) for row in rows]


class TestLives:
    """Restarts, starts and stops."""

    def test_the_first_life_seen_is_a_start_at_its_own_time(self):
        """A member found running began when its process did, not when it was found."""
        (row,) = Ledger().read(life("1:a", started_at=900.0))

        assert (row.kind, row.at, row.after, row.incarnation) == ("start", 900.0, "1:a", "1:a")

    def test_another_life_is_a_restart_once(self):
        """A second process of the same command is one restart row, however often it is seen."""
        ledger = Ledger()
        ledger.read(life("1:a"))
        rows = ledger.read(life("2:b", started_at=990.0)) + ledger.read(life("2:b", 990.0))

        assert facts_of(rows) == [("restart", "", "1:a", "2:b")]
        assert rows[0].at == 990.0

    def test_a_life_that_ends_is_a_stop(self):
        """A process that is gone is told once, and its successor is a restart."""
        ledger = Ledger()
        ledger.read(life("1:a"))
        gone = Harvest((seen(v.ALIVE, value=False, life=None, at=1001.0),))
        rows = ledger.read(gone) + ledger.read(gone) + ledger.read(life("2:b", 1005.0))

        assert [(row.kind, row.at) for row in rows] == [("stop", 1001.0), ("restart", 1005.0)]

    def test_what_the_store_knew_is_not_told_again(self):
        """A Tandem that starts anew writes no row for a life it had on record."""
        known = Known(incarnation="1:a", started_at=900.0, alive=True)

        assert Ledger(lambda _: known).read(life("1:a")) == ()

    def test_a_restart_while_nobody_watched_is_found(self):
        """Another life than the one on record is a restart, with what changed."""
        known = Known(incarnation="1:a", started_at=900.0, alive=True, command_line=OLD)
        rows = Ledger(lambda _: known).read(life("2:b", argv=NEW))

        assert {row.kind for row in rows} == {"restart", "flag"}


class TestStarts:
    """Flags, variables and server arguments."""

    def test_changed_flags_are_rows_with_the_component_they_touch(self):
        """A changed value and a new switch are told, and traits say what they touch."""
        touches = Harvest(
            traits=(
                Trait(
                    subject="decode-0",
                    name=v.T_TOUCHES,
                    at=1.0,
                    label="--disable-overlap-schedule",
                    value="scheduler",
                ),
            )
        )
        ledger = Ledger(touches={"--cuda-graph-max-bs": "compute"})
        ledger.read(touches)
        ledger.read(life("1:a"))
        rows = ledger.read(life("2:b", argv=NEW))

        assert [(row.what, row.before, row.after, row.touches) for row in rows[1:]] == [
            ("--cuda-graph-max-bs", "32", "96", "compute"),
            ("--disable-overlap-schedule", None, "", "scheduler"),
        ]

    def test_the_same_launch_is_a_restart_and_nothing_else(self):
        """Without a difference there is one row."""
        ledger = Ledger()
        ledger.read(life("1:a", env={"SGLANG_X": "1"}, args={"page_size": "1"}))
        rows = ledger.read(life("2:b", env={"SGLANG_X": "1"}, args={"page_size": "1"}))

        assert [row.kind for row in rows] == ["restart"]

    def test_variables_appear_change_and_vanish(self):
        """Each difference of the environment is a row."""
        ledger = Ledger()
        ledger.read(life("1:a", env={"SGLANG_A": "1", "SGLANG_B": "1"}))
        rows = ledger.read(life("2:b", env={"SGLANG_A": "2", "SGLANG_C": "1"}))

        assert facts_of(row for row in rows if row.kind == "env") == [
            ("env", "SGLANG_A", "1", "2"),
            ("env", "SGLANG_B", "1", None),
            ("env", "SGLANG_C", None, "1"),
        ]

    def test_the_first_variable_of_a_member_is_a_change(self):
        """A member without any allowed variable was looked at, so its first one is told."""
        ledger = Ledger()
        ledger.read(life("1:a"))
        rows = ledger.read(life("2:b", env={"SGLANG_A": "1"}))

        assert facts_of(rows)[1:] == [("env", "SGLANG_A", None, "1")]

    def test_an_environment_that_could_not_be_read_is_no_change(self):
        """Being refused is not the same as finding nothing."""
        ledger = Ledger()
        ledger.read(life("1:a", env={"SGLANG_A": "1"}))
        refused = [one for one in life("2:b").observations if one.name != v.ENVIRONMENT]
        refused.append(seen(v.ENVIRONMENT, None, life="2:b", missing="not ours to see"))

        assert [row.kind for row in ledger.read(Harvest(tuple(refused)))] == ["restart"]

    def test_a_default_that_moved_with_the_version_is_told_once(self):
        """Server arguments tell what no command line shows, and repeat none that it does."""
        ledger = Ledger()
        ledger.read(life("1:a", args={"page_size": "1", "version": "0.5.15", "port": "30000"}))
        rows = ledger.read(
            life("2:b", args={"page_size": "64", "version": "0.5.16", "port": "30001"})
        )

        assert facts_of(rows)[1:] == [
            ("flag", "--page-size", "1", "64"),
            ("package", "--version", "0.5.15", "0.5.16"),
        ]

    def test_an_argument_that_a_loading_server_does_not_say_is_no_change(self):
        """A server asked before its model is loaded leaves its defaults out; nothing changed."""
        ledger = Ledger()
        ledger.read(life("1:a", args={"page_size": "1", "context_length": "2048"}))
        rows = ledger.read(life("2:b", 950.0, args={"page_size": "1"}, at=1001.0))

        assert [row.kind for row in rows] == ["restart"]

    def test_a_redacted_value_equals_anything(self):
        """What the store shows of a secret says nothing, so it is no change."""
        known = Known("1:a", 900.0, alive=True, command_line=(*OLD, "--api-key", "<redacted>"))
        rows = Ledger(lambda _: known).read(life("2:b", argv=(*OLD, "--api-key", "s3cret")))

        assert [row.kind for row in rows] == ["restart"]


class TestKnownFrom:
    """What the store's facts know of a member."""

    def test_a_ledger_that_begins_with_it_repeats_nothing(self):
        """Everything of the last life is known again, what older lives had is not."""
        older = life("1:a", 800.0, env={"SGLANG_GONE": "1"}, at=850.0).observations
        last = life("2:b", 900.0, env={"SGLANG_A": "1"}, args={"page_size": "1"})
        facts = Facts(Deployment(name="x", members=()), older + last.observations, now=1001.0)
        known = known_from(facts, "decode-0")
        ledger = Ledger(lambda _: known)
        again, next_ = ledger.read(last), ledger.read(life("3:c", 990.0, env={"SGLANG_A": "2"}))

        assert (again, known.environment) == ((), {"SGLANG_A": "1"})
        assert facts_of(next_)[1:] == [("env", "SGLANG_A", "1", "2")]

    def test_an_environment_without_variables_is_known_to_have_none(self):
        """That there was no variable to show is no variable; the first one is a change."""
        facts = Facts(Deployment(name="x", members=()), life("1:a").observations, now=1001.0)
        known = known_from(facts, "decode-0")
        same = Ledger(lambda _: known).read(life("2:b"))
        more = Ledger(lambda _: known).read(life("2:b", env={"SGLANG_A": "1"}))

        assert [row.kind for row in same] == ["restart"]
        assert facts_of(more)[1:] == [("env", "SGLANG_A", None, "1")]

    def test_a_life_that_was_seen_to_stop_is_not_alive(self):
        """A stop on record is not told a second time."""
        stop = Change(at=1000.0, subject="decode-0", kind="stop", incarnation="1:a")
        deployment = Deployment(name="x", members=())
        facts = Facts(deployment, life("1:a").observations, now=1001.0, changes=(stop,))
        gone = Harvest((seen(v.ALIVE, value=False, life=None, at=1001.0),))

        assert Ledger(lambda _: known_from(facts, "decode-0")).read(gone) == ()

    def test_of_an_unknown_member_nothing_is_known(self):
        """Without a process there is no life to remember."""
        facts = Facts(Deployment(name="x", members=()), (), now=1.0)

        assert known_from(facts, "decode-0") is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("python", "-m", "x"), {"argv": "python -m x"}),
        (("x", "--a=1", "--b"), {"argv": "x", "--a": "1", "--b": ""}),
        (("x", "--p", "u", "1", "--p", "v"), {"argv": "x", "--p": "u 1 v"}),
    ],
)
def test_a_command_line_reads_as_flags(words, expected):
    """Values belong to the flag before them, switches are empty, repeated flags are joined."""
    assert flags(words) == expected
