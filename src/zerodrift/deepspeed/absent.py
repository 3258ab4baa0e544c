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
_LOGGING = "`step` leaves norm, scale and skips on the engine: log them yourself."
_PROFILE = "Use `torch.profiler`, with `with_flops=True`."
_COMPRESSION = "Weights are neither quantized nor pruned."
_TUNING = "`zerodrift plan` prints memory and traffic of a config without running it."

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
    "monitor": (_LOGGING, ""),
    "monitor.config": (
        _LOGGING,
        "DeepSpeedMonitorConfig TensorBoardConfig WandbConfig CSVConfig CometConfig get_monitor_config",
    ),
    "monitor.monitor": (_LOGGING, "Monitor MonitorMaster"),
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
    "profiling.flops_profiler": (_PROFILE, "FlopsProfiler get_model_profile"),
    "profiling.flops_profiler.profiler": (_PROFILE, "FlopsProfiler get_model_profile"),
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
}
"""By module: what to use instead, and the names that are asked for."""
