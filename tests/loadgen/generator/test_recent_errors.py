from loadgen.generator.recent_errors import COUNTED, RecentErrors


def test_refusals_that_end_before_long_answers_are_counted_with_them():
    """One request in ten is refused at once; the others answer later, in the order of their sends."""
    errors = RecentErrors()
    numbers = range(1, 1_001)
    refused, answered = ([n for n in numbers if (n % 10 == 0) == is_refused] for is_refused in (True, False))

    shares = [errors.add(number, number % 10 == 0) for number in (*refused, *answered)]

    assert max(shares) == 0.1


def test_the_worst_successive_requests_count_if_one_end_completes_many():
    errors = RecentErrors()
    for number in range(2, 4 * COUNTED + 1):
        errors.add(number, COUNTED < number <= 2 * COUNTED)

    assert errors.add(1, False) == 1.0


def test_requests_that_the_load_generator_ended_do_not_count():
    errors = RecentErrors()
    shares = [errors.add(number, None if number % 2 else True) for number in range(1, 2 * COUNTED + 1)]

    assert shares[-1] == 1.0
    assert set(shares[:-1]) == {0.0}
