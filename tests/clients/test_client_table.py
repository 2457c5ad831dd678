"""The table of clients and features."""

from tests.clients.matrix import Client, Outcome, load_clients, render_table


def test_every_client_has_a_script():
    for client in load_clients():
        assert client.script.is_file(), client.name


def test_the_table_marks_passed_failed_not_run_and_impossible_calls():
    client = Client(
        "little", ["little==1.2"], ["little"], ["generate", "chat", "tools"], {"chat_stream": "it reads no streams"}
    )

    table = render_table([Outcome(client, {"little": "1.2"}, {"generate": None, "chat": "a traceback"})])

    assert table.splitlines()[2:] == [
        "| little 1.2 | yes |  |  |  | **fails** | no [1] | **not run** |  |  |  |  |",
        "",
        "[1] little, chat streamed: it reads no streams.",
    ]
