"""Modules of DeepSpeed's of which nothing is here: what to use instead, and the names that are asked for.

Data: `unsupported.py` makes modules of it. Where a part of a module is here, it is a file, and the rest of
its names is in `unsupported.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

_EXPERTS = "A mixture of experts in plain modules is sharded like any other part of the model."
_PIPELINE = "Use a plain module with `zero_optimization.stage: 3`."
_INFERENCE = "There is no inference engine; generate with the model itself."
_SEQUENCE = "A sequence is not split over ranks. Shard with `zero_optimization.stage: 3`."
_ATTENTION = "Attention is the model's own."
_INJECTION = "The model runs as it is; there is no kernel injection."
_STAGES = "Ask `engine.zero_optimization_stage()`; the optimizer of every stage is `DeepSpeedOptimizer`."
_SETTINGS = "Use `zerodrift.load(file)`, which checks every key."
_COMET = "Use `csv_monitor`, `tensorboard` or `wandb`."
_PROFILE = "Use `torch.profiler`, with `with_flops=True`."
_COMPRESSION = "Weights are neither quantized nor pruned."
_TUNING = "`zerodrift plan` prints memory and traffic of a config without running it."
_ORDER = "Order the samples in the loader."
_ROUTING = "Every layer sees every token; drop tokens in the model."
_ANY_RANKS = "Every checkpoint loads on any number of ranks, at any stage: there is nothing to convert."
_ONE_BIT = "Gradients are sent in `precision.reduce`: use AdamW."
_FILES = "Call `engine.save_checkpoint`, which writes and checks every file."
_COMMS = "`zerodrift plan` lists every collective of a step."

ABSENT: Mapping[str, tuple[str, str]] = {
    "autotuning": (_TUNING, "Autotuner"),
    "compression": (_COMPRESSION, ""),
    "compression.compress": (_COMPRESSION, "init_compression redundancy_clean student_initialization"),
    "elasticity": (
        "A checkpoint loads on any number of ranks; write the batch sizes.",
        "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config DSElasticAgent",
    ),
    "inference": (_INFERENCE, ""),
    "inference.config": (_INFERENCE, "DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig"),
    "inference.engine": (_INFERENCE, "InferenceEngine"),
    "linear": ("Use PEFT's LoRA.", "OptimizedLinear LoRAConfig QuantizationConfig Init init_lora"),
    "module_inject": (
        _INJECTION,
        "replace_transformer_layer revert_transformer_layer generic_injection set_autotp_mode DSPolicy "
        "LinearAllreduce LinearLayer EmbeddingLayer HFBertLayerPolicy",
    ),
    "moe.experts": (_EXPERTS, "Experts"),
    "moe.layer": (_EXPERTS, "MoE"),
    "moe.mappings": (_EXPERTS, "gather_tokens drop_tokens"),
    "moe.sharded_moe": (_EXPERTS, "MOELayer TopKGate top1gating top2gating topkgating"),
    "monitor.config": (_COMET, "CometConfig"),
    "nebula": ("There is no checkpoint service: call `save_checkpoint` as often as needed.", ""),
    "ops.adagrad": ("Use `torch.optim.Adagrad` without ZeRO, or AdamW.", "DeepSpeedCPUAdagrad"),
    "ops.fp_quantizer": ("Weights are not quantized.", "FP_Quantize Quantizer matmul_fp8"),
    "ops.lamb": ("LAMB needs whole parameters. Use AdamW.", "FusedLamb"),
    "ops.sparse_attention": (
        _ATTENTION,
        "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
        "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseSelfAttention "
        "BertSparseSelfAttention",
    ),
    "ops.transformer": (
        _INJECTION,
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig DeepSpeedTransformerInference "
        "DeepSpeedInferenceConfig DeepSpeedMoEInference DeepSpeedMoEInferenceConfig",
    ),
    "profiling": (_PROFILE, ""),
    "profiling.config": (_PROFILE, "DeepSpeedFlopsProfilerConfig"),
    "profiling.flops_profiler": (
        _PROFILE,
        "FlopsProfiler get_model_profile number_to_string macs_to_string params_to_string flops_to_string "
        "duration_to_string",
    ),
    "profiling.flops_profiler.profiler": (
        _PROFILE,
        "FlopsProfiler get_model_profile number_to_string macs_to_string params_to_string flops_to_string "
        "duration_to_string",
    ),
    "runtime.bf16_optimizer": (_STAGES, "BF16_Optimizer"),
    "runtime.compiler": (
        "Call `torch.compile` on the model's blocks.",
        "is_compile_supported is_compiling disable enable compiled_autograd",
    ),
    "runtime.config_utils": (
        _SETTINGS,
        "DeepSpeedConfigModel DeepSpeedConfigObject get_scalar_param get_list_param get_dict_param",
    ),
    "runtime.data_pipeline": ("Order the samples in the loader.", ""),
    "runtime.eigenvalue": ("Nothing is scheduled by curvature here.", "Eigenvalue"),
    "runtime.fp16": (_STAGES, ""),
    "runtime.fp16.fused_optimizer": (_STAGES, "FP16_Optimizer"),
    "runtime.fp16.loss_scaler": (
        "The scale is the engine's: read `optimizer.loss_scaler`, set it in the config's `fp16` block.",
        "LossScaler DynamicLossScaler LossScalerBase LossScaleConfig LossScaleProfile CreateLossScaler",
    ),
    "runtime.fp16.unfused_optimizer": (_STAGES, "FP16_UnfusedOptimizer"),
    "runtime.hybrid_engine": (_INFERENCE, "DeepSpeedHybridEngine"),
    "runtime.pipe": (_PIPELINE, "PipelineModule LayerSpec TiedLayerSpec ProcessTopology"),
    "runtime.pipe.engine": (_PIPELINE, "PipelineEngine"),
    "runtime.pipe.module": (_PIPELINE, "PipelineModule LayerSpec TiedLayerSpec PipelineError"),
    "runtime.pipe.schedule": (
        _PIPELINE,
        "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction OptimizerStep "
        "ForwardPass BackwardPass",
    ),
    "runtime.pipe.topology": (
        _PIPELINE,
        "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
    ),
    "runtime.progressive_layer_drop": ("Every layer runs in every step.", "ProgressiveLayerDrop"),
    "runtime.sequence_parallel": (_SEQUENCE, ""),
    "runtime.sequence_parallel.ulysses_sp": (
        _SEQUENCE,
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter TiledMLP TiledFusedLogitsLoss SequenceTiledCompute "
        "sequence_tiled_compute TiledLoss UlyssesSPFwdLossBwdWithLogits",
    ),
    "runtime.sparse_tensor": ("Gradients are dense: use `sparse=False`.", "SparseTensor"),
    "runtime.swap_tensor": ("Nothing is offloaded to NVMe.", ""),
    "runtime.tensor_parallel": (
        "Shard with `zero_optimization.stage: 3` instead of over a tensor-parallel axis.",
        "TpTrainingManager get_tensor_parallel_config",
    ),
    "runtime.weight_quantizer": (_COMPRESSION, "WeightQuantization"),
    "runtime.zero.linear": (
        "Linear layers are left as they are.",
        "LinearModuleForZeroStage3 LinearFunctionForZeroStage3 zero3_linear_wrap",
    ),
    "runtime.zero.mics": (
        "Use `zero.Init`, and `mics_shard_size` or `sharding.replicate` in the config.",
        "MiCS_Init MiCS_Optimizer MiCS_Offload",
    ),
    "runtime.zero.tiling": (
        "Use `torch.nn.Linear`: stage 3 shards its weight like any other.",
        "TiledLinear TiledLinearReturnBias",
    ),
    "sequence": (_SEQUENCE, ""),
    "sequence.cross_entropy": (_SEQUENCE, "vocab_sequence_parallel_cross_entropy"),
    "sequence.layer": (_SEQUENCE, "DistributedAttention single_all_to_all"),
    "utils.init_on_device": ("Use `with torch.device('meta'):`, or `zero.Init`.", "OnDevice"),
    "utils.numa": ("Bind ranks to cores with the launcher.", "get_numactl_cmd get_numa_cores"),
    "utils.timer": (
        "Use `torch.profiler`.",
        "SynchronizedWallClockTimer ThroughputTimer NoopTimer CudaEventTimer trim_mean",
    ),
    "autotuning.autotuner": (_TUNING, "Autotuner"),
    "checkpoint.constants": (_FILES, ""),
    "checkpoint.deepspeed_checkpoint": (_ANY_RANKS, "DeepSpeedCheckpoint"),
    "checkpoint.ds_to_universal": (_ANY_RANKS, "main parse_arguments extract_zero_shards merge_tp_slices"),
    "checkpoint.reshape_utils": (_ANY_RANKS, "get_files get_zero_files merge_state partition_data"),
    "checkpoint.universal_checkpoint": (
        _ANY_RANKS,
        "SubparamShape enable_universal_checkpoint load_hp_checkpoint_state",
    ),
    "compile": ("Call `torch.compile` on the model's blocks.", ""),
    "compile.config": ("Call `torch.compile` on the model's blocks.", "CompileConfig"),
    "compression.basic_layer": (_COMPRESSION, "QuantAct Embedding_Compress LinearLayer_Compress"),
    "compression.helper": (_COMPRESSION, "module_replacement convert_conv1d_to_linear fix_compression"),
    "compression.scheduler": (_COMPRESSION, "compression_scheduler"),
    "elasticity.elastic_agent": (
        "Start it with torchrun, and load a checkpoint on the ranks that there are.",
        "DSElasticAgent",
    ),
    "elasticity.elasticity": (
        "A checkpoint loads on any number of ranks; write the batch sizes.",
        "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config",
    ),
    "env_report": ("Run `zerodrift doctor`.", "main cli_main op_report debug_report"),
    "launcher.launch": ("Start it with torchrun.", "main parse_args"),
    "module_inject.auto_tp": (_INJECTION, "AutoTP Loading ReplaceWithTensorSlicing"),
    "module_inject.layers": (
        _INJECTION,
        "LinearAllreduce LinearLayer EmbeddingLayer Normalize set_autotp_mode",
    ),
    "module_inject.policy": (_INJECTION, "DSPolicy TransformerPolicy"),
    "module_inject.replace_module": (
        _INJECTION,
        "replace_transformer_layer revert_transformer_layer generic_injection GroupQuantizer",
    ),
    "monitor.comet": (_COMET, "CometMonitor"),
    "nvme": ("Nothing is offloaded to NVMe.", ""),
    "ops.adagrad.cpu_adagrad": ("Use `torch.optim.Adagrad` without ZeRO, or AdamW.", "DeepSpeedCPUAdagrad"),
    "ops.aio": ("Nothing is offloaded to NVMe.", "AsyncIOBuilder"),
    "ops.lamb.fused_lamb": ("LAMB needs whole parameters. Use AdamW.", "FusedLamb"),
    "runtime.checkpoint_engine": (_FILES, ""),
    "runtime.checkpoint_engine.checkpoint_engine": (_FILES, "CheckpointEngine CheckpointCommitInfo"),
    "runtime.checkpoint_engine.torch_checkpoint_engine": (_FILES, "TorchCheckpointEngine"),
    "runtime.data_pipeline.curriculum_scheduler": (_ORDER, "CurriculumScheduler"),
    "runtime.data_pipeline.data_routing": (_ROUTING, ""),
    "runtime.data_pipeline.data_routing.basic_layer": (_ROUTING, "RandomLayerTokenDrop"),
    "runtime.data_pipeline.data_routing.helper": (
        _ROUTING,
        "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict",
    ),
    "runtime.data_pipeline.data_routing.scheduler": (_ROUTING, "BaseScheduler RandomLTDScheduler"),
    "runtime.data_pipeline.data_sampling": (_ORDER, ""),
    "runtime.data_pipeline.data_sampling.data_analyzer": (_ORDER, "DataAnalyzer DistributedDataAnalyzer"),
    "runtime.data_pipeline.data_sampling.data_sampler": (_ORDER, "DeepSpeedDataSampler"),
    "runtime.data_pipeline.data_sampling.indexed_dataset": (
        _ORDER,
        "MMapIndexedDataset MMapIndexedDatasetBuilder IndexedDataset make_dataset make_builder",
    ),
    "runtime.fp16.onebit": (_ONE_BIT, "OnebitAdam OnebitLamb ZeroOneAdam"),
    "runtime.fp16.onebit.adam": (_ONE_BIT, "OnebitAdam"),
    "runtime.fp16.onebit.lamb": (_ONE_BIT, "OnebitLamb"),
    "runtime.fp16.onebit.zoadam": (_ONE_BIT, "ZeroOneAdam"),
    "runtime.precision_config": (
        _SETTINGS,
        "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config",
    ),
    "runtime.quantize": (_COMPRESSION, "Quantizer"),
    "runtime.state_dict_factory": (_FILES, "SDLoaderFactory SDLoaderBase MegatronSDLoader"),
    "runtime.swap_tensor.aio_config": ("Nothing is offloaded to NVMe.", "get_aio_config"),
    "sequence.fpdt_layer": (_SEQUENCE, "FPDT_Attention FPDT_FFN FPDT_LogitsLoss SequenceChunk"),
    "utils.comms_logging": (_COMMS, "CommsLogger get_caller_func convert_size calc_bw_log"),
}
"""By module: what to use instead, and the names that are asked for."""
