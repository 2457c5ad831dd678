from tuner.servers.tgi.derive import derived_params


def test_values_that_only_the_bundled_server_has_are_searched_only_there():
    own, other = (derived_params({}, is_own=is_own)["quantize"].values for is_own in (True, False))

    assert "int4" in own
    assert set(own) - set(other) == {"int4"}
