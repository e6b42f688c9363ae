"""`llmc serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from llmc.cli.effects import refuse_without_effect
from llmc.cli.options import adapters_option, device_option, loading_options
from llmc.cli.sampling import first_given, generation_config_option
from llmc.errors import LlmcError
from llmc.installation import install_command


def _string_list(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    """Parse a list of strings, in JSON or separated by commas."""
    if value is None:
        return None
    try:
        read = json.loads(value) if value.lstrip().startswith("[") else \
            [part.strip() for part in value.split(",") if part.strip()]
    except ValueError:
        read = None
    if not isinstance(read, list) or not all(isinstance(part, str) for part in read):
        raise LlmcError(f"--{param.name} is '{value}', expected a list of strings; write it as a,b "
                        f"or '[\"a\", \"b\"]'")
    return read


class _ApiKeys(click.types.StringParamType):
    """A key that may contain spaces; the environment variable has one per line."""

    envvar_list_splitter = "\n"


@click.command("serve")
@click.argument("case_dir", nargs=-1, required=True, type=click.Path(path_type=Path))
@device_option
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0: all addresses.")
@click.option("--port", default=8000, help="Port to listen on; 0: any free port.")
@click.option("--served_model_name", multiple=True,
              help="Model name in requests and responses; repeat it for each CASE_DIR.  [default: "
                   "the directory's name]")
@click.option("--tool_call_parser", default=None,
              help="Format of the model's tool calls: hermes, llama3_json, llama4_pythonic, "
                   "mistral, qwen3_coder, glm45, deepseek_v3, deepseek_v31, deepseek_v32, "
                   "deepseek_v4, kimi_k2, minimax_m2, seed_oss or harmony.  [default: that of the "
                   "chat template]")
@click.option("--reasoning_parser", default="auto",
              help="Markers of the model's reasoning: think, mistral, seed_oss, none, or auto for "
                   "those of the chat template.")
@click.option("--response_store_mb", default=64.0,
              help="Memory for stored responses of /v1/responses, in MB; 0: store none.")
@click.option("--response_store_ttl", default=3600.0,
              help="Lifetime of a stored response, in seconds.")
@click.option("--chat_template_content_format", default="auto",
              type=click.Choice(["auto", "string", "openai"]),
              help="Content of messages as the chat template gets it: a string, a list of parts "
                   "(openai), or that of the request if the template supports it (auto).")
@generation_config_option
@click.option("--enable_tokenizer_info_endpoint", is_flag=True,
              help="Serve /tokenizer_info: the tokenizer's configuration and the chat template.")
@click.option("--enable_prompt_embeds", is_flag=True,
              help="Take prompt_embeds in /v1/completions: embeddings instead of a prompt. The "
                   "model must be compiled with --enable_prompt_embeds.")
@adapters_option
@click.option("--allow_runtime_lora_updating", is_flag=True,
              help="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter: clients may load "
                   "adapters from directories of this machine.")
@click.option("--watch", is_flag=True,
              help="When CASE_DIR is replaced, load the new model and switch to it without "
                   "failing a request.")
@click.option("--api_key", "api_keys", multiple=True, type=_ApiKeys(), envvar="LLMC_API_KEY",
              show_envvar=True,
              help="API key that requests must have, visible in the process list; may be "
                   "repeated, and the variable has one key per line.  [default: none]")
@click.option("--api_key_file", default=None, type=click.Path(path_type=Path),
              help="File of more API keys, one `name: key` or `key` per line; the log has the "
                   "names.")
@click.option("--max_waiting", default=256,
              help="Maximum number of waiting sequences; further requests get 429 with "
                   "Retry-After.")
@click.option("--max_seqs_per_key", default=None, type=int,
              help="Maximum number of running and waiting sequences of an API key.  [default: an "
                   "equal share for each key, at least the batch size]")
@click.option("--allow_priority", is_flag=True,
              help="Allow `priority` in requests; without it, values other than 0 get 400.")
@click.option("--max_request_bytes", default=8 * 2**20,
              help="Maximum size of a request's body, in bytes, but of those of "
                   "--max_media_request_bytes.")
@click.option("--max_media_request_bytes", default=26 * 2**20,
              help="Maximum size of the body of a request with audio, and of a chat with a model "
                   "that takes images or audio, in bytes.")
@click.option("--request_timeout", default=1800.0,
              help="Maximum duration of a request, in seconds.")
@click.option("--header_timeout", default=10.0,
              help="Maximum time to receive the headers of a request, in seconds.")
@click.option("--write_timeout", default=60.0,
              help="Time after which a connection is closed if its client reads nothing, in "
                   "seconds.")
@click.option("--stall_timeout", default=60.0,
              help="Time without a completed step of pending work after which /health is 503, in "
                   "seconds.")
@click.option("--drain_timeout", default=30,
              help="Time for running requests to finish after SIGTERM, in seconds.")
@click.option("--allowed_hosts", callback=_string_list, metavar="HOST,…",
              help="Host names that requests may have besides localhost, 127.0.0.1 and [::1]; *: "
                   "any.  [default: none if --host is a loopback address, else *]")
@click.option("--allowed_origins", callback=_string_list, default="[]", metavar="ORIGIN,…",
              show_default=False,
              help="Origins of web pages that may use the server (CORS), such as "
                   "https://example.com; *: any.  [default: none]")
@click.option("--allowed_methods", callback=_string_list, default="*", metavar="METHOD,…",
              help="HTTP methods that those origins may use.")
@click.option("--allowed_headers", callback=_string_list, default="*", metavar="HEADER,…",
              help="Request headers that those origins may set.")
@click.option("--allow_credentials", is_flag=True,
              help="Let those origins send credentials.")
@click.option("--limit_mm_per_prompt", default="image=16,audio=4", metavar="NAME=N,…",
              help="Maximum number of images and of audio clips of a prompt.")
@click.option("--allowed_media_domains", callback=_string_list, default="[]", metavar="HOST,…",
              show_default=False,
              help="Hosts of http and https URLs of images and audio; *.example.com: every name "
                   "below it, *: any.  [default: none; only data: URLs are read]")
@click.option("--allowed_media_networks", callback=_string_list, default="[]", metavar="CIDR,…",
              show_default=False,
              help="Networks that those hosts may be in besides the public Internet, such as "
                   "10.1.0.0/16.  [default: none]")
@click.option("--allowed_local_media_path", type=click.Path(path_type=Path), default=None,
              help="Directory of file: URLs of images and audio.  [default: none]")
@click.option("--media_timeout", default=10.0,
              help="Maximum time to read a URL, in seconds.")
@click.option("--max_media_bytes", default=32 * 2**20,
              help="Maximum size of all images and audio of a request, in bytes.")
@click.option("--media_memory_gb", default=4.0,
              help="Memory for preprocessed images and audio of all requests, in GB; further "
                   "requests with any get 429 with Retry-After.")
@click.option("--ssl_keyfile", type=click.Path(path_type=Path),
              help="PEM file of the certificate's private key.")
@click.option("--ssl_certfile", type=click.Path(path_type=Path),
              help="PEM file of the server's certificate; enables HTTPS.")
@click.option("--ssl_ca_certs", type=click.Path(path_type=Path),
              help="PEM file of the authorities of client certificates.")
@click.option("--ssl_cert_reqs", type=click.IntRange(0, 2), default=0,
              help="Client certificates: 0 not requested, 1 optional, 2 required.")
@loading_options
def serve_command(case_dir: tuple[Path, ...], api_keys: tuple[str, ...], api_key_file: Path | None,
                  max_waiting: int, max_seqs_per_key: int | None, allow_priority: bool,
                  max_request_bytes: int, max_media_request_bytes: int, request_timeout: float,
                  header_timeout: float, write_timeout: float, stall_timeout: float,
                  drain_timeout: int, limit_mm_per_prompt: str, allowed_media_domains: list[str],
                  allowed_media_networks: list[str], allowed_local_media_path: Path | None,
                  media_timeout: float, max_media_bytes: int, media_memory_gb: float,
                  ssl_keyfile: Path | None, ssl_certfile: Path | None, ssl_ca_certs: Path | None,
                  ssl_cert_reqs: int, allowed_hosts: list[str] | None, allowed_origins: list[str],
                  allowed_methods: list[str], allowed_headers: list[str], allow_credentials: bool,
                  **options: Any) -> None:
    """Serve the models in CASE_DIR … over the OpenAI HTTP API.

    A request goes to the model that it names. Options of loading apply to each model.
    """
    from llmc.artifacts.manifest import MANIFEST_NAME, read_manifest

    try:
        from llmc.server.access import Access
        from llmc.server.limits import ServerLimits, read_api_keys
        from llmc.server.media import media_limits
        from llmc.server.serve import serve
        from llmc.server.tls import tls_context
    except ModuleNotFoundError as error:
        raise LlmcError(f"the server needs {error.name}; install it with: "
                        f"{install_command('serve')}") from error

    lonely = first_given(("max_loras", "max_lora_rank"))
    if lonely and not (options["adapters"] or options["allow_runtime_lora_updating"]):
        raise LlmcError(f"--{lonely} is given without --lora_modules or "
                        f"--allow_runtime_lora_updating; give one, or leave it out")
    limits = ServerLimits(
        api_keys=read_api_keys(api_keys, api_key_file), max_waiting=max_waiting,
        max_seqs_per_key=max_seqs_per_key, allow_priority=allow_priority,
        max_request_bytes=max_request_bytes,
        max_media_request_bytes=max_media_request_bytes, request_timeout=request_timeout,
        header_timeout=header_timeout, write_timeout=write_timeout, stall_timeout=stall_timeout,
        drain_timeout=drain_timeout)
    access = Access(allowed_hosts, allowed_origins, allowed_methods, allowed_headers,
                    allow_credentials)
    media = media_limits(allowed_media_domains, allowed_media_networks, allowed_local_media_path,
                         max_media_bytes, media_timeout, limit_mm_per_prompt, media_memory_gb)
    tls = tls_context(ssl_keyfile, ssl_certfile, ssl_ca_certs, ssl_cert_reqs)
    if all((own / MANIFEST_NAME).is_file() for own in case_dir):  # others are errors of `serve`
        refuse_without_effect(*map(read_manifest, case_dir))
    serve(case_dir, limits=limits, access=access, media=media, tls=tls, **options)
