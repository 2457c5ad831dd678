"""The nginx configuration that balances replicas of a server, for each policy of a plan that nginx has."""

from collections.abc import Mapping, Sequence

PREFIX_CHARACTERS = 256
"""Characters at the start of a prompt that select the replica. Prompts of different groups must differ in them."""
BODY_LIMIT = "2m"
"""The largest body, as the bundled server's. A body on disk would have no start."""

# The text of the first `inputs`, `prompt`, `content` or `text`, in which a backslash escapes the next character.
_START = (
    r"~\"(?:inputs|prompt|content|text)\"\s*:\s*\[?\s*\"" rf"(?<start>(?:[^\"\\\\]|\\\\.){{1,{PREFIX_CHARACTERS}}})"
)
_MAP = f'''map $request_body $prompt_start {{
    # A request without a prompt goes to any replica.
    default $request_id;
    "{_START}" $start;
}}
'''
# The line of the upstream block. The plan's `least_loaded` is `least_conn`.
LINES: Mapping[str, str] = {
    "round_robin": "",
    "least_loaded": "    least_conn;\n",
    "two_choices": "    random two least_conn;\n",
    "prefix_hash": "    hash $prompt_start consistent;\n",
}


def nginx_balancer(policy: str, replicas: Sequence[str]) -> str:
    """The blocks for nginx' `http` block. `replicas`: HOST:PORT of each."""
    servers = "".join(f"    server {replica} fail_timeout=1s;\n" for replica in replicas)
    body = f"client_max_body_size {BODY_LIMIT};"
    if policy == "prefix_hash":
        # `$request_body` has only a body that is in one buffer.
        body += f"\n    client_body_buffer_size {BODY_LIMIT};\n    client_body_in_single_buffer on;"
    return f"""{_MAP if policy == "prefix_hash" else ""}upstream tgi {{
{LINES[policy]}{servers}    keepalive 64;
}}
server {{
    listen 80;
    {body}
    location / {{
        proxy_pass http://tgi;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_buffering off;
        proxy_read_timeout 600s;
        proxy_next_upstream error timeout non_idempotent;
        proxy_next_upstream_tries 2;
    }}
}}
"""
