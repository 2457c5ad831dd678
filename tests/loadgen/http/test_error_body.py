"""Messages in the bodies of error responses."""

import pytest

from loadgen.http.error_body import message_of


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"error":{"code":500,"message":"image input is not supported","type":"server_error"}}',
            "image input is not supported",
        ),
        (
            b'{"error":"`inputs` must have less than 10 tokens","error_type":"validation"}',
            "`inputs` must have less than 10 tokens",
        ),
        (b'{"detail":[{"loc":["body","n"],"msg":"must be 1"}]}', "must be 1"),
        (b'{"type":"error","error":{"type":"invalid","message":"no such model"}}', "no such model"),
        (b"Model is\n overloaded\n", "Model is overloaded"),
        (b"<html><body>502</body></html>", ""),
        (b'{"error":{"message":"cut', '{"error":{"message":"cut'),
        (b'{"error":{"code":500}}', ""),
        (b"[]", ""),
        (b"\xff", "\ufffd"),
        (b"", ""),
        (b"[" * 2048, "[" * 2048),
    ],
)
def test_servers_1_the_message_of_an_error_is_found_in_every_form(body, message):
    assert message_of(body) == message
