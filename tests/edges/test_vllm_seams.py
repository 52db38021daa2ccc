"""What we rely on in vLLM. When one of these fails, vLLM has changed there."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import BatchFeature
from vllm import connections, entrypoints
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.connections import HTTPConnection
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints import rl
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, QueueOverflowError
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.processing import processor
from vllm.renderers import base as renderers_base
from vllm.renderers import chat_utils
from vllm.renderers.params import TokenizeParams
from vllm.tracing import utils as tracing_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import core as engine_core
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from frontend.admission_middleware import ADMINISTRATIVE
from frontend.arena_cache import ArenaProcessorCache
from frontend.engine_client import RoutedEngineClient
from frontend.media.connector import LazyMediaConnector
from workers.engine_calls import ENGINE_CALLS, MODEL_RUNNER_CALLS

NOT_WHEN_ROUTED = {
    "prepare_elastic_ep": "scaling one engine's experts; add workers instead",
    "commit_elastic_ep": "scaling one engine's experts; add workers instead",
    "handle_fault": "fault tolerance of one engine's ranks",
    "get_status": "fault tolerance of one engine's ranks",
    "compute_weight_checksums_async": "development endpoint",
    "get_kv_event_sources": "frontends get KV events from workers",
}
"""Methods of the engine client that AsyncLLM calls and a fleet does not have, and why."""


def source_of(thing: Any) -> str:
    return inspect.getsource(thing)


def parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def methods_called_on_the_engine() -> set[str]:
    """Names X in ``self.engine_core.X(...)`` and ``engine_core.X(...)`` of AsyncLLM."""
    called = set()
    for node in ast.walk(ast.parse(source_of(inspect.getmodule(AsyncLLM)))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name == "engine_core":
            called.add(node.func.attr)
    return called


@pytest.mark.parametrize("method", sorted(methods_called_on_the_engine()))
def test_what_async_llm_calls_is_there(method: str) -> None:
    ours = getattr(RoutedEngineClient, method, None)
    inherited = ours is getattr(EngineCoreClient, method, None)
    assert not inherited or method in NOT_WHEN_ROUTED, f"frontend/: AsyncLLM calls {method}"


@pytest.mark.parametrize(
    "method", sorted(methods_called_on_the_engine() - set(NOT_WHEN_ROUTED))
)
def test_our_engine_client_takes_what_async_llm_passes(method: str) -> None:
    theirs = getattr(AsyncMPClient, method)
    assert parameters_of(getattr(RoutedEngineClient, method)) == parameters_of(theirs)


def test_the_engine_client_is_made_by_name() -> None:
    source = source_of(AsyncLLM.__init__)
    assert "EngineCoreClient.make_async_mp_client(" in source
    assert "renderer=renderer" in source


def test_the_processor_caches_are_made_by_name() -> None:
    source = source_of(renderers_base.BaseRenderer.__init__)
    assert "self._mm_processor_cache = processor_cache_from_config(config)" in source
    assert "self._mm_processor_only_cache = processor_only_cache_from_config(" in source
    assert "self._resources.callback(self._mm_processor_cache.close)" in source


def test_requests_are_counted_before_the_engine_client_sees_them() -> None:
    source = source_of(AsyncLLM._add_request)
    counted = source.index("self.output_processor.add_request(")
    assert counted < source.index("self.engine_core.add_request_async(")
    assert parameters_of(AsyncLLM._add_request)[:2] == ["self", "request"]


def test_client_uuids_pass_through_one_method() -> None:
    source = source_of(renderers_base.BaseRenderer._process_multimodal)
    assert "self._process_mm_uuids(" in source


def test_a_request_is_processed_by_one_call_of_the_processor() -> None:
    source = source_of(renderers_base.BaseRenderer._process_multimodal)
    assert "mm_processor = self.get_mm_processor()" in source
    assert "mm_processor.apply(" in source


def test_what_belongs_to_no_items_is_looked_up_by_lacking_item() -> None:
    fields = {"pixels": MultiModalFieldConfig.batched("image")}
    assert MultiModalKwargsItems.from_hf_inputs(BatchFeature(), fields) == {}
    base = processor.BaseMultiModalProcessor
    for process in (base._cached_apply_hf_processor, base._apply_hf_processor):
        source = source_of(process)
        assert source.count("self._get_mm_fields_config(") == 1
        assert source.count("self._get_mm_prompt_updates(") == 1
        assert re.search(r"from_hf_inputs\(\s+\w+,\s+self._get_mm_fields_config\(", source)
    assert "mm_missing_prompt_updates.get(modality, [])" in source_of(base._merge_mm_kwargs)
    models = Path(inspect.getfile(processor)).parents[2] / "model_executor" / "models"
    names = re.compile(
        "def (_get_mm_prompt_updates|_bind_and_group_updates|_merge_mm_kwargs)\\("
    )
    overriding = [path.name for path in models.rglob("*.py") if names.search(path.read_text())]
    assert overriding == [], "frontend/spared_work.py: models do this in their own way now"


def test_chats_make_a_processor_of_the_models_configuration() -> None:
    made = chat_utils.BaseMultiModalItemTracker.__dict__["mm_processor"]
    assert isinstance(made, cached_property)
    assert "self.mm_registry.create_processor(self.model_config)" in source_of(made.func)


def test_prompts_are_tokenized_by_one_method() -> None:
    source = source_of(renderers_base.BaseRenderer)
    assert "self._tokenize_prompt_async = make_async(" in source
    assert "tokenizer(prompt[\"prompt\"], **kwargs)" in source_of(
        renderers_base.BaseRenderer._tokenize_prompt
    )
    assert set(TokenizeParams(max_total_tokens=9).get_encode_kwargs()) == {
        "truncation", "max_length", "add_special_tokens",
    }


def test_media_connectors_are_chosen_by_name() -> None:
    source = source_of(chat_utils.AsyncMultiModalContentParser)
    assert "MEDIA_CONNECTOR_REGISTRY.load(\n            envs.VLLM_MEDIA_CONNECTOR," in source
    assert "self._connector.fetch_image_async(image_url)" in source


@pytest.mark.parametrize(
    "method",
    ["fetch_image", "fetch_image_async", "load_from_url", "load_from_url_async",
     "_load_data_url", "_load_file_url"],
)
def test_our_connector_takes_what_vllms_takes(method: str) -> None:
    theirs = parameters_of(getattr(MediaConnector, method))
    assert parameters_of(getattr(LazyMediaConnector, method)) == theirs


def test_all_media_by_url_come_through_the_methods_that_we_replace() -> None:
    source = source_of(MediaConnector)
    fetching = source.count("async def fetch_") - source.count("_embedding_async(")
    assert source.count("await self.load_from_url_async(") == fetching


def test_images_are_hashed_as_bytes_and_how_they_were_converted() -> None:
    source = source_of(MultiModalHasher.serialize_item)
    assert '{"io_config": obj.io_config, "data": obj.original_bytes}' in source
    assert source_of(ImageMediaIO.load_bytes).count("converted is not image") == 1


def test_http_goes_through_one_session() -> None:
    source = source_of(HTTPConnection.get_async_response)
    assert "client = await self.get_async_client()" in source
    assert parameters_of(connections._async_read_response_bytes) == ["response", "max_bytes"]
    assert 'kwargs["timeout"] = attempt_timeout' in source_of(connections._async_retry)


def test_the_app_is_built_by_name() -> None:
    assert "build_app(args" in source_of(entry.build_and_serve)
    assert "args.middleware" in source_of(
        inspect.getmodule(entry.__dict__["build_app"]).init_entrypoints_middleware  # type: ignore[union-attr]
    )


def test_the_processor_asks_the_cache_in_this_order() -> None:
    source = source_of(processor.BaseMultiModalProcessor._merge_mm_kwargs)
    assert source.index("touch_sender_cache_item") < source.index("get_and_update_item")
    looks = source_of(processor.BaseMultiModalProcessor._get_cache_missing_items)
    assert "cache.is_cached(hashes)" in looks


def test_what_the_cache_lacks_is_found_out_before_anything_is_processed() -> None:
    source = source_of(processor.BaseMultiModalProcessor._cached_apply_hf_processor)
    looks = source.index("self._get_cache_missing_items(")
    assert looks < source.index("self._apply_hf_processor_main(")
    assert parameters_of(processor.BaseMultiModalProcessor._get_cache_missing_items)[1:] == [
        "cache", "mm_data_items", "mm_hashes",
    ]


def test_requests_are_processed_where_ours_can_be_put_in_between() -> None:
    base = renderers_base.BaseRenderer
    assert "await self._process_multimodal_async(" in source_of(base._process_tokens_async)
    made = source_of(base.__init__)
    assert "self._mm_executor = ThreadPoolExecutor(max_workers=1)" in made
    assert "self._process_multimodal, executor=self._mm_executor" in made
    assert "mm_processor_kwargs=" in source_of(base._process_tokens_async)


def test_an_image_says_how_it_was_converted() -> None:
    source = source_of(ImageMediaIO.load_bytes)
    for name in ("image_mode", "rgba_background_color"):
        assert f'"{name}": self.{name}' in source
    assert "MediaWithBytes(converted, data, io_config)" in source


def test_prompt_updates_are_what_we_send() -> None:
    assert [f.name for f in fields(processor.ResolvedPromptUpdate)] == [
        "modality", "item_idx", "mode", "target", "content",
    ]
    assert [f.name for f in fields(processor.PromptUpdateDetails)] == ["full", "is_embed"]


def test_our_cache_has_all_that_a_processor_cache_has() -> None:
    assert not ArenaProcessorCache.__abstractmethods__
    for name in ("is_cached_item", "get_and_update_item", "make_stats", "validate_input_item"):
        ours = parameters_of(getattr(ArenaProcessorCache, name))
        assert ours == parameters_of(getattr(BaseMultiModalProcessorCache, name)), name


def test_the_identifier_ends_with_the_hash() -> None:
    assert 'f"{lora_request.lora_name}:{mm_hash}"' in source_of(
        InputProcessor._get_mm_identifier
    )


def test_the_children_of_a_request_are_numbered_before_its_id() -> None:
    assert 'f"{index}_{self.request_id}"' in source_of(ParentRequest.get_child_info)


@pytest.mark.parametrize(
    "struct, names",
    [
        (EngineCoreRequest, {"request_id", "prompt_token_ids", "mm_features", "resumable",
                             "sampling_params", "prompt_embeds", "cache_salt"}),
        (EngineCoreOutput, {"request_id", "new_token_ids", "finish_reason"}),
        (EngineCoreOutputs, {"engine_index", "outputs", "scheduler_stats", "timestamp",
                             "weight_version", "utility_output"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_messages_have_the_fields_we_use(
    struct: type[msgspec.Struct], names: set[str]
) -> None:
    assert names <= set(struct.__struct_fields__)


@pytest.mark.parametrize(
    "dataclass, names",
    [
        (MultiModalFeatureSpec, {"data", "modality", "identifier", "mm_position", "mm_hash"}),
        (MultiModalFieldElem, {"data", "field"}),
        (SchedulerStats, {"num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs",
                          "kv_cache_usage"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dataclasses_have_the_fields_we_use(dataclass: Any, names: set[str]) -> None:
    assert names <= {field.name for field in fields(dataclass)}


def test_covered_items_are_stripped_to_their_cpu_fields() -> None:
    source = source_of(scheduler_output)
    assert "strip_covered_mm_data(" in source


def test_the_engine_process_is_started_by_the_name_that_we_replace() -> None:
    assert "target=EngineCoreProc.run_engine_core" in source_of(
        engine_utils.CoreEngineProcManager.__init__
    )


@pytest.mark.parametrize("method", sorted(ENGINE_CALLS))
def test_the_engine_has_what_frontends_may_call(method: str) -> None:
    assert hasattr(engine_core.EngineCoreProc, method)


def test_something_can_be_asked_of_every_model_runner() -> None:
    assert callable(WorkerBase.synchronize_device)


def test_blocks_are_hashed_by_one_function() -> None:
    assert parameters_of(kv_cache_utils.get_request_block_hasher) == [
        "hash_block_size", "caching_hash_fn",
    ]
    assert "get_request_block_hasher(" in source_of(engine_core.EngineCore.__init__)


def test_speculative_decoding_says_whether_it_drops_a_block() -> None:
    assert callable(SpeculativeConfig.use_eagle_block_drop)


def test_engine_flags_have_the_names_that_a_worker_sets() -> None:
    names = {field.name for field in fields(AsyncEngineArgs)}
    assert {"worker_cls", "mm_processor_cache_gb", "prefix_caching_hash_algo",
            "kv_events_config", "data_parallel_size", "enable_prefix_caching",
            "ec_transfer_config"} <= names


def test_the_scheduler_asks_a_connector_for_encoder_outputs_as_ours_expects() -> None:
    schedule = source_of(Scheduler.schedule)
    assert schedule.index("ensure_cache_available(") < schedule.index(
        "_allocate_encoder_inputs("
    )
    assert "self.ec_connector.build_connector_meta(" in source_of(Scheduler)
    encoder_inputs = source_of(Scheduler._try_schedule_encoder_inputs)
    assert "self.ec_connector.has_cache_item(" in encoder_inputs
    allocate = source_of(Scheduler._allocate_encoder_inputs)
    assert "self.ec_connector.update_state_after_alloc(request, input_id)" in allocate
    update = source_of(Scheduler.update_from_output)
    assert "self.ec_connector.take_unavailable_requests()" in update
    assert "self.ec_connector.update_connector_output(" in update
    assert "ec_connector_stats" in {field.name for field in fields(SchedulerStats)}
    assert "scheduled_encoder_inputs" in {
        field.name for field in fields(scheduler_output.SchedulerOutput)
    }


def test_a_model_runner_loads_before_it_encodes_and_saves_what_it_encoded() -> None:
    lifecycle = source_of(ECConnectorModelRunnerMixin)
    assert lifecycle.index("start_load_caches(encoder_cache") < lifecycle.index("yield output")
    assert "maybe_save_ec_to_connector" in source_of(GPUModelRunner._cache_encoder_output)
    assert "not get_ec_transfer().is_consumer" in source_of(GPUModelRunner.execute_model)


def test_an_engine_that_only_produces_only_encodes() -> None:
    resolve = source_of(VllmConfig._resolve_mm_encoder_only)
    assert "mm_config.mm_encoder_only = True" in resolve
    assert ECTransferConfig(ec_connector="c", ec_role="ec_producer").is_encode_only
    assert not ECTransferConfig(ec_connector="c", ec_role="ec_both").is_encode_only


def test_what_clients_send_is_parsed_by_one_method() -> None:
    process = source_of(renderers_base.BaseRenderer._process_multimodal)
    assert "mm_processor = self.get_mm_processor()" in process
    assert "mm_processor.info.parse_mm_data(mm_data)" in process
    get = renderers_base.BaseRenderer.get_mm_processor
    assert "return self.mm_processor" in source_of(get)
    assert hasattr(PlaceholderRange, "get_num_embeds")
    assert hasattr(ModelConfig, "get_inputs_embeds_size")


def test_admission_is_asked_with_a_number_and_counts_what_is_unfinished() -> None:
    assert parameters_of(AsyncLLM.check_admission)[:2] == ["self", "n"]
    source = source_of(AsyncLLM.check_admission)
    assert "get_num_unfinished_requests" in source and "QueueOverflowError" in source
    assert issubclass(QueueOverflowError, GracefulHTTPError)
    error = create_error_response(GracefulHTTPError("text", HTTPStatus.REQUEST_TIMEOUT)).error
    assert (error.code, error.message) == (408, "text")


@pytest.mark.parametrize("path", sorted(ADMINISTRATIVE))
def test_what_may_be_posted_to_a_full_server_is_a_path_of_vllms(path: str) -> None:
    root = Path(inspect.getfile(entrypoints)).parent
    assert any(f'"{path}"' in each.read_text() for each in root.rglob("api_router.py"))


def test_vllms_server_names_the_methods_that_collective_rpc_may_name() -> None:
    named = source_of(inspect.getmodule(AsyncLLM))
    named += (Path(inspect.getfile(rl)).parent / "online" / "api_router.py").read_text()
    called = set(re.findall(r'collective_rpc\(\s*"(\w+)"', named))
    assert called <= MODEL_RUNNER_CALLS
    assert MODEL_RUNNER_CALLS - called <= {"reload_weights"}


def test_processed_prompts_say_where_items_are() -> None:
    source = source_of(processor.BaseMultiModalProcessor.apply)
    assert "mm_placeholders" in source and "prompt_token_ids" in source


def test_traces_go_through_the_renderer_and_the_traceparent_header() -> None:
    source = source_of(renderers_base.BaseRenderer._process_tokens_async)
    assert "await self._process_multimodal_async(" in source
    for method in ("render_chat_async", "render_cmpl_async"):
        assert inspect.iscoroutinefunction(getattr(renderers_base.BaseRenderer, method))
    assert "traceparent" in tracing_utils.TRACE_HEADERS
    assert "tracing_endpoint" in source_of(AsyncLLM.__init__)


def test_a_first_output_tells_what_was_cached() -> None:
    assert "prefill_stats" in EngineCoreOutput.__struct_fields__
    assert "num_cached_tokens" in {field.name for field in fields(PrefillStats)}
    assert "external_req_id" in EngineCoreRequest.__struct_fields__
    assert "trace_headers" in EngineCoreRequest.__struct_fields__
