from loadgen.generator.settled_requests import settled_requests
from reports.run_schema import RequestRecord

S = 1_000_000_000


def record(number, sent_s, end_s, worker=0, **changes):
    name = f"run-{worker}-{number}" if worker else f"run-{number}"
    return RequestRecord("run", name, worker=worker, t_sent_ns=sent_s * S, t_end_ns=end_s * S, **changes)


def test_requests_sent_before_the_oldest_in_flight_are_settled():
    # Request 3 is in flight: it was sent at 2 s or later.
    found = settled_requests([record(1, 0, 9), record(4, 3, 5), record(2, 2, 4), record(5, 4, 6)])

    assert [each.request_id for each in found.records] == ["run-1", "run-2"]
    assert found.end_ns == 2 * S


def test_the_request_of_any_worker_that_was_sent_first_ends_the_settled_ones():
    records = [record(1, 0, 1), record(2, 5, 6), record(1, 1, 2, worker=1), record(3, 4, 6, worker=1)]

    found = settled_requests(records, workers=(0, 1))

    assert [each.request_id for each in found.records] == ["run-1", "run-1-1"]


def test_nothing_is_settled_while_a_worker_has_no_record():
    assert settled_requests([record(1, 0, 1), record(2, 1, 2)], workers=(0, 1)).records == []
    assert settled_requests([]).records == []


def test_a_request_that_was_refused_is_settled_and_one_that_was_never_sent_has_no_place():
    refused = RequestRecord("run", "run-2", t_dispatch_ns=1 * S, t_end_ns=1 * S)
    waited = RequestRecord("run", "run-w1-p7", t_dispatch_ns=2 * S, t_end_ns=3 * S)

    found = settled_requests([record(1, 0, 1), refused, waited, record(3, 2, 4)])

    assert [each.request_id for each in found.records] == ["run-1", "run-2", "run-w1-p7", "run-3"]


def test_an_open_loop_is_settled_up_to_an_intended_start():
    late = record(2, 4, 5, t_intended_ns=1 * S)

    found = settled_requests([record(1, 0, 1, t_intended_ns=0), late, record(4, 4, 5, t_intended_ns=3 * S)],
                             is_open_loop=True)  # fmt: skip

    assert found.end_ns == 1 * S
    assert found.records[-1] is late
