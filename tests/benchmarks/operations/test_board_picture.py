from benchmarks.operations.board import BoardPanel, BoardQuery, board_panels, board_queries
from benchmarks.operations.board_picture import draw_board
from benchmarks.operations.prometheus import Series

LATENCY = BoardQuery("Latency", "p50 of {{instance}}", "latency", "s")
DRAFTS = BoardQuery("Drafts", "accepted", "drafts", "percentunit")
PANELS = [
    BoardPanel("Load", 0, 0, 24, 1, ()),
    BoardPanel("Latency", 0, 1, 12, 8, (LATENCY,)),
    BoardPanel("Drafts", 12, 1, 12, 8, (DRAFTS,)),
]


def test_a_picture_has_each_panel_at_its_place_in_its_unit():
    values = {"latency": [Series({"instance": "a:1"}, [(100.0, 0.002), (101.0, 0.004)])], "drafts": []}

    figure = draw_board(PANELS, lambda query: values[query.expression])

    assert [text.get_text() for text in figure.texts] == ["Load"]
    latency, drafts = figure.axes
    assert [each.get_title(loc="left") for each in (latency, drafts)] == ["Latency, ms", "Drafts, %"]
    assert latency.get_position().x1 < drafts.get_position().x0
    (line,) = latency.lines
    assert line.get_label() == "p50 of a:1"
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0.0, 2.0), (1.0, 4.0)]
    assert [text.get_text() for text in drafts.texts] == ["no data"]


def test_the_panels_of_the_board_do_not_overlap():
    cells = [
        (column, row)
        for panel in board_panels(60)
        for column in range(panel.x, panel.x + panel.width)
        for row in range(panel.y, panel.y + panel.height)
    ]

    assert len(cells) == len(set(cells))


def test_the_queries_of_the_board_have_no_variable_left():
    assert [query.name for query in board_queries(60) if "$" in query.expression] == []
