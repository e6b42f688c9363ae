"""Hooks in vLLM: one for engine options, one for the parameters of each request."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from llmc.errors import LlmcError
from llmc_vllm import options, parameters
from llmc_vllm.model import ARCHITECTURE, MODEL_TYPE, is_case_dir
from llmc_vllm.release import check_release, is_supported


def install() -> None:
    """Install the hooks, once per process.

    With an unsupported release of vLLM, case directories are rejected and nothing else changes.
    """
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs.create_engine_config, "__wrapped__"):
        return
    EngineArgs.create_engine_config = _with_options(EngineArgs.create_engine_config)
    if is_supported():
        _register()


def _register() -> None:
    """Register llmc's model, and the check of its requests."""
    from transformers import AutoConfig, PretrainedConfig
    from vllm import ModelRegistry
    from vllm.v1.engine.input_processor import InputProcessor

    from llmc_vllm.stub import LlmcForCausalLM

    AutoConfig.register(MODEL_TYPE, type("LlmcConfig", (PretrainedConfig,),
                                         {"model_type": MODEL_TYPE}), exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, LlmcForCausalLM)
    InputProcessor.process_inputs = _with_check(InputProcessor.process_inputs)


def _with_options(create_engine_config: Any) -> Any:
    """Wrap `create_engine_config` to complete the options of a case directory first."""
    @functools.wraps(create_engine_config)
    def create(self: Any, *arguments: Any, **named: Any) -> Any:
        if not is_case_dir(self.model):
            return create_engine_config(self, *arguments, **named)
        check_release()
        case_dir = Path(self.model).absolute()
        manifest = options.complete(self, case_dir)
        config = create_engine_config(self, *arguments, **named)
        options.check_ranks(config.parallel_config, manifest, case_dir)
        return config

    return create


def _with_check(process_inputs: Any) -> Any:
    """Wrap `process_inputs` to reject unsupported parameters of llmc's models with status 400."""
    from vllm.exceptions import VLLMValidationError

    @functools.wraps(process_inputs)
    def process(self: Any, request_id: str, prompt: Any, params: Any, *arguments: Any,
                **named: Any) -> Any:
        if self.model_config.hf_config.model_type == MODEL_TYPE:
            try:
                parameters.check(params)
            except LlmcError as error:
                raise VLLMValidationError(str(error)) from error
            # vLLM's own workers lack some parameters with drafts, such as min_p.
            self.speculative_config = None
        return process_inputs(self, request_id, prompt, params, *arguments, **named)

    return process
