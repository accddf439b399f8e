"""What a launcher says of itself (``launcher.handshake``)."""

from deepspeed.launcher.handshake import FRONT, LauncherInfo


def test_the_name_of_a_launcher_lists_the_ranks_of_its_node() -> None:
    """Nodes of different sizes, so that no node has the ranks of another one."""
    me = LauncherInfo(0, "hub", (2, 1, 3), 29500, "1.0")
    assert me.name_of(0, "a") == "node 0 (ranks 0 to 1, host a)"
    assert me.name_of(1, "b") == "node 1 (rank 2, host b)"
    assert me.name_of(2, "c") == "node 2 (ranks 3 to 5, host c)"
    assert me.name_of(FRONT, "d") == "the command on host d"
