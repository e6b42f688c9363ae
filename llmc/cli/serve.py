"""`llmc serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from llmc.cli.options import device_option, loading_options
from llmc.cli.sampling import generation_config_option
from llmc.errors import LlmcError
from llmc.installation import install_command


def _string_list(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    """Parse a list of strings: JSON, or separated by commas."""
    if value is None:
        return None
    try:
        read = json.loads(value) if value.lstrip().startswith("[") else \
            [part.strip() for part in value.split(",") if part.strip()]
    except ValueError:
        read = None
    if not isinstance(read, list) or not all(isinstance(part, str) for part in read):
        raise LlmcError(f"--{param.name} '{value}' is not a list; give one such as a,b or "
                        f"'[\"a\", \"b\"]'")
    return read


class _ApiKeys(click.types.StringParamType):
    """A key that may contain spaces; an environment variable holds one per line."""

    envvar_list_splitter = "\n"


@click.command("serve")
@click.argument("case_dir", type=click.Path(path_type=Path))
@device_option
@click.option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0 for all.")
@click.option("--port", default=8000, help="0 for any that is free.")
@click.option("--served_model_name", default=None,
              help="What clients call the model.  [default: the directory's name]")
@click.option("--tool_call_parser", default=None,
              help="How the model calls tools: hermes, llama3_json, llama4_pythonic, mistral, "
                   "qwen3_coder, glm45, deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, "
                   "kimi_k2, minimax_m2, seed_oss or harmony.  [default: as its chat template "
                   "does]")
@click.option("--reasoning_parser", default="auto",
              help="Marks around the model's reasoning: think, mistral, seed_oss, none, or auto "
                   "for those of its chat template.")
@click.option("--response_store_mb", default=64.0, help="Memory for stored responses of "
                                                        "/v1/responses; 0 stores none.")
@click.option("--response_store_ttl", default=3600.0, help="Seconds that a response is stored.")
@click.option("--chat_template_content_format", default="auto",
              type=click.Choice(["auto", "string", "openai"]),
              help="Form of messages' content: a text (string) or a list of parts (openai).  auto: "
                   "as in the request, unless the chat template cannot read that.")
@generation_config_option
@click.option("--enable_tokenizer_info_endpoint", is_flag=True,
              help="Serve /tokenizer_info: the tokenizer's configuration and the chat template.")
@click.option("--watch", is_flag=True, help="Load what replaces CASE_DIR, and let it take over "
                                            "without losing a request.")
@click.option("--api_key", "api_keys", multiple=True, type=_ApiKeys(), envvar="LLMC_API_KEY",
              show_envvar=True,
              help="Key that clients must give. Repeat the option for several keys; the variable "
                   "has one a line. The list of processes shows it.  [default: none]")
@click.option("--api_key_file", default=None, type=click.Path(path_type=Path),
              help="File of further API keys, one a line: `name: key` or `key`. The log shows "
                   "names.")
@click.option("--max_waiting", default=256,
              help="Sequences that may wait beside those that are decoded. Further requests get "
                   "429 with Retry-After.")
@click.option("--max_seqs_per_key", default=None, type=int,
              help="Sequences of one API key that may run or wait.  [default: an equal part for "
                   "each key, at least as many as are decoded at once]")
@click.option("--allow_priority", is_flag=True,
              help="Allow the field priority in requests. Without it, values other than 0 are "
                   "refused.")
@click.option("--max_request_bytes", default=8 * 2**20, help="Of a request's body.")
@click.option("--request_timeout", default=1800.0, help="Seconds that a request may take.")
@click.option("--header_timeout", default=10.0, help="Seconds that the headers of a request may "
                                                     "take.")
@click.option("--write_timeout", default=60.0,
              help="Seconds after which a connection whose client reads nothing is closed.")
@click.option("--stall_timeout", default=60.0,
              help="Seconds without a completed step, while there is work, after which /health is "
                   "503.")
@click.option("--drain_timeout", default=30, help="Seconds that requests have to end after a "
                                                  "SIGTERM.")
@click.option("--allowed_hosts", callback=_string_list, metavar="HOST,…",
              help="Host names that requests may use beside localhost, 127.0.0.1 and [::1]; * for "
                   "any.  [default: none where --host is a loopback address, else *]")
@click.option("--allowed_origins", callback=_string_list, default="[]", metavar="ORIGIN,…",
              help="Origins whose web pages may use the server (CORS), as https://example.com; * "
                   "for any. Like the next two, a list with commas or in JSON.")
@click.option("--allowed_methods", callback=_string_list, default="*", metavar="METHOD,…",
              help="HTTP methods that those pages may use.")
@click.option("--allowed_headers", callback=_string_list, default="*", metavar="HEADER,…",
              help="Request headers that those pages may set.")
@click.option("--allow_credentials", is_flag=True, help="Those pages may send credentials.")
@click.option("--ssl_keyfile", type=click.Path(path_type=Path), help="Key of the certificate, PEM.")
@click.option("--ssl_certfile", type=click.Path(path_type=Path),
              help="Certificate, PEM; serves HTTPS.")
@click.option("--ssl_ca_certs", type=click.Path(path_type=Path),
              help="Authorities of clients' certificates, PEM.")
@click.option("--ssl_cert_reqs", type=click.IntRange(0, 2), default=0,
              help="Clients' certificates: 0 not asked for, 1 optional, 2 required.")
@loading_options
def serve_command(case_dir: Path, api_keys: tuple[str, ...], api_key_file: Path | None,
                  max_waiting: int, max_seqs_per_key: int | None, allow_priority: bool,
                  max_request_bytes: int, request_timeout: float, header_timeout: float,
                  write_timeout: float, stall_timeout: float, drain_timeout: int,
                  ssl_keyfile: Path | None, ssl_certfile: Path | None, ssl_ca_certs: Path | None,
                  ssl_cert_reqs: int, allowed_hosts: list[str] | None, allowed_origins: list[str],
                  allowed_methods: list[str], allowed_headers: list[str], allow_credentials: bool,
                  **options: Any) -> None:
    """Serve the model in CASE_DIR by OpenAI's HTTP interface."""
    try:
        from llmc.server.access import Access
        from llmc.server.limits import ServerLimits, read_api_keys
        from llmc.server.serve import serve
        from llmc.server.tls import tls_context
    except ModuleNotFoundError as error:
        raise LlmcError(f"the server needs {error.name}; install it with: "
                        f"{install_command('serve')}") from error

    serve(case_dir, limits=ServerLimits(
        api_keys=read_api_keys(api_keys, api_key_file), max_waiting=max_waiting,
        max_seqs_per_key=max_seqs_per_key, allow_priority=allow_priority,
        max_request_bytes=max_request_bytes, request_timeout=request_timeout,
        header_timeout=header_timeout, write_timeout=write_timeout, stall_timeout=stall_timeout,
        drain_timeout=drain_timeout),
        access=Access(allowed_hosts, allowed_origins, allowed_methods, allowed_headers,
                      allow_credentials),
        tls=tls_context(ssl_keyfile, ssl_certfile, ssl_ca_certs, ssl_cert_reqs), **options)
