"""The names of DeepSpeed 0.19.6 that scripts import: where zerodrift defines each, or what to use instead.

A table has headings, with lines of `modules: names` below them. A deeper indent continues a line. Module
names are relative to `deepspeed`. `modules.py` makes modules from the tables.
"""

from __future__ import annotations

ROOT = "deepspeed"
"""The package itself, in place of a module."""
ENGINE = "engine"
"""The engine's class, in place of a module."""
PARAMETER = "param"
"""A parameter, in place of a module."""

LOWER_CASE = "lower case"
RETURNS = "returns "

PRESENT = """
tools.collectives
    comm comm.comm: all_gather all_gather_into_tensor all_reduce all_to_all_single allgather_fn barrier
        broadcast gather get_global_rank get_local_rank=local_rank get_world_group init_distributed irecv
        isend log_summary logger monitored_barrier recv reduce reduce_scatter reduce_scatter_fn
        reduce_scatter_tensor scatter send
    constants: TORCH_DISTRIBUTED_DEFAULT_PORT=PORT default_pg_timeout=TIMEOUT
    utils utils.groups: get_data_parallel_group=get_world_group _get_data_parallel_group=get_world_group
tools.curves
    monitor.config: CSVConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config
    monitor.csv_monitor: csvMonitor
    monitor.monitor: Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor
    monitor.tensorboard: TensorBoardMonitor
    monitor.wandb: WandbMonitor
tools.device
    accelerator accelerator.real_accelerator: get_accelerator
    accelerator accelerator.abstract_accelerator: DeepSpeedAccelerator=Accelerator
engine
    runtime.engine: DeepSpeedEngine
tools.estimates
    runtime.zero.stage3: estimate_zero3_model_states_mem_needs
        estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
    runtime.zero.stage_1_and_2: estimate_zero2_model_states_mem_needs
        estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live
tools.functions
    checkpoint.utils: clone_tensors_for_torch_save
    moe.utils: configure_moe_param_groups is_moe_param_group
        split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params
    runtime.activation_checkpointing.checkpointing: checkpoint configure is_configured
        non_reentrant_checkpoint=checkpoint
    runtime.dataloader: DeepSpeedDataLoader RepeatingLoader
    utils: RepeatingLoader
    runtime.swap_tensor: MIN_SWAPPABLE_BYTES
    runtime.utils: move_to_device see_memory_usage
    runtime.zero.leaf_module_config: DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES
        DEFAULT_LEAF_MODULE_NAME_SUFFIXES
    runtime.zero.partition_parameters: _orig_torch_arange zero_wrapper_for_fp_tensor_constructor
    runtime.zero.utils runtime.zero.partition_parameters: is_zero_param
    utils utils.logging: log_dist logger set_log_level_from_string warning_once
    utils utils.nvtx: instrument_w_nvtx
    utils utils.z3_leaf_module: get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules
        set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module
        z3_leaf_parameter
    utils.torch: required_torch_version
    zero runtime.zero runtime.zero.partition_parameters: register_external_parameter
    zero runtime.zero: unwrap_model_for_generation
optimizer
    runtime.base_optimizer: DeepSpeedOptimizer ZeROOptimizer=DeepSpeedOptimizer
    runtime.zero.parameter_offload zero runtime.zero: DeepSpeedZeRoOffload=ParameterOffload
    runtime.zero.stage3: DeepSpeedZeroOptimizer_Stage3
    runtime.zero.stage_1_and_2: DeepSpeedZeroOptimizer
tools.optimizers
    ops: __compatible_ops__=COMPATIBLE
    ops.adam ops.adam.cpu_adam: DeepSpeedCPUAdam
    ops.adam ops.adam.fused_adam: FusedAdam
    ops.lion ops.lion.cpu_lion: DeepSpeedCPULion
    ops.lion ops.lion.fused_lion: FusedLion
    ops.op_builder: ALL_OPS OpBuilder CPUAdamBuilder FusedAdamBuilder CPULionBuilder FusedLionBuilder
        UtilsBuilder CPUAdagradBuilder FusedLambBuilder AsyncIOBuilder GDSBuilder QuantizerBuilder
        FPQuantizerBuilder RandomLTDBuilder SparseAttnBuilder SpatialInferenceBuilder TransformerBuilder
        StochasticTransformerBuilder InferenceBuilder InferenceCoreBuilder RaggedOpsBuilder
        EvoformerAttnBuilder
    ops.aio: AsyncIOBuilder GDSBuilder
    git_version_info: compatible_ops=COMPATIBLE installed_ops=INSTALLED torch_info=TORCH_INFO
parameters.values
    runtime.torch_autocast: PARAM_COMM_DTYPE_ATTR_NAME get_all_comm_dtypes get_comm_dtype
        get_default_autocast_lower_precision_modules has_comm_dtype sort_dtypes
    runtime.zero.config: ZERO_OPTIMIZATION ZeroStageEnum
    runtime.zero.offload_config: OffloadDeviceEnum OffloadStateTypeEnum
    utils utils.tensor_fragment: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
        safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
        safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
        safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
        safe_update_full_grad_vectorized
parameters.attributes
    zero runtime.zero runtime.zero.partition_parameters: ZeroParamStatus ZeroParamType
runner
    launcher.runner: DEEPSPEED_ENVIRONMENT_NAME main parse_args
parameters.contexts
    zero runtime.zero runtime.zero.partition_parameters: GatheredParameters Init
    zero runtime.zero runtime.zero.mics: MiCS_Init=Init
zero_to_fp32
    utils.zero_to_fp32: convert_zero_checkpoint_to_fp32_state_dict
        get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint main
torch.distributed
    comm comm.comm: ReduceOp all_gather_object all_to_all broadcast_object_list destroy_process_group
        get_all_ranks_from_group=get_process_group_ranks get_rank get_world_size is_available
        is_initialized new_group
    utils utils.groups: get_data_parallel_rank=get_rank get_data_parallel_world_size=get_world_size
        _get_data_parallel_rank=get_rank _get_data_parallel_world_size=get_world_size
zerodrift.errors
    runtime.config: DeepSpeedConfigError=ConfigError
    runtime.zero.utils: ZeRORuntimeException=ZerodriftError
zerodrift.deepspeed
    git_version_info: version=__version__ git_hash=__git_hash__ git_branch=__git_branch__
zerodrift.optim.schedules
    runtime.lr_schedules: LR_RANGE_TEST LR_SCHEDULE ONE_CYCLE VALID_LR_SCHEDULES WARMUP_COSINE_LR
        WARMUP_DECAY_LR WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR LRRangeTest OneCycle WarmupCosineLR
        WarmupDecayLR WarmupLR
returns None
    comm comm.comm: configure reset_log
    runtime.activation_checkpointing.checkpointing: reset
    zero runtime.zero runtime.zero.partition_parameters: unregister_external_parameter
returns 0
    utils utils.groups: get_model_parallel_rank get_tensor_model_parallel_rank
returns 1
    utils utils.groups: get_model_parallel_world_size get_tensor_model_parallel_world_size
returns True
    accelerator accelerator.real_accelerator: is_current_accelerator_supported
    comm comm.comm: has_all_gather_into_tensor has_reduce_scatter_tensor
returns False
    comm comm.comm: has_all_reduce_coalesced has_coalescing_manager
    moe.utils: is_moe_param
returns (False, [])
    moe.utils: has_moe_layers
lower case
    runtime.lr_schedules: LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE
        LR_RANGE_TEST_STAIRCASE EDGE_VALUE MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT
        CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR
        DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR
        WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS
    runtime.config: ADAGRAD_OPTIMIZER=adagrad ADAM_OPTIMIZER=adam ADAMW_OPTIMIZER=adamw
        LAMB_OPTIMIZER=lamb LION_OPTIMIZER=lion MUON_OPTIMIZER=muon
"""
"""Home of the names -> modules and names. `Name=other` is the home's `other` under DeepSpeed's name. Names
below `LOWER_CASE` are strings, equal to their own names in lower case. Names below `RETURNS` are functions
that return the given value for any arguments."""

ABSENT = """
`zerodrift plan` prints memory and traffic of a config without running it.
    autotuning
`zerodrift plan` lists every collective of a step.
    utils.comms_logging
Run `zerodrift doctor`.
    env_report
Write the batch sizes; a checkpoint loads on any number of ranks.
    elasticity
Start it with torchrun; a checkpoint loads on any number of ranks.
    elasticity.elastic_agent launcher.launch
Bind ranks to cores with the launcher.
    utils.numa
    utils: get_numactl_cmd
There is no inference engine; generate with the model itself.
    inference runtime.hybrid_engine
    deepspeed: default_inference_config InferenceEngine DeepSpeedInferenceConfig DeepSpeedHybridEngine
        init_inference
Weights are neither quantized nor pruned.
    compression runtime.weight_quantizer runtime.quantize ops.fp_quantizer
The model runs as it is; there is no kernel injection.
    module_inject ops.transformer ops.sparse_attention
    deepspeed: replace_transformer_layer revert_transformer_layer
    deepspeed ops: DeepSpeedTransformerLayer DeepSpeedTransformerConfig
A mixture of experts in plain modules is sharded like any other part of the model.
    moe.experts moe.layer moe.mappings moe.sharded_moe
    moe.utils: split_params_grads_into_shared_and_expert_params
Use a plain module with `zero_optimization.stage: 3`.
    pipe runtime.pipe
    deepspeed: PipelineModule PipelineEngine
A sequence is not split over ranks. Shard with `zero_optimization.stage: 3`.
    sequence runtime.sequence_parallel
Shard with `zero_optimization.stage: 3` instead of over a tensor-parallel axis.
    runtime.tensor_parallel
    deepspeed: tp_model_init set_autotp_mode domino
    utils: get_model_parallel_group get_tensor_model_parallel_group get_tensor_model_parallel_src_rank
        set_tensor_model_parallel_rank set_tensor_model_parallel_world_size
Linear layers are left as they are; use PEFT's LoRA.
    linear runtime.zero.linear
Use `torch.nn.Linear`: stage 3 shards its weight like any other.
    runtime.zero.tiling
    zero runtime.zero: TiledLinear TiledLinearReturnBias
Write `mics_shard_size` or `sharding.replicate` in the config.
    runtime.zero.mics
Use `with torch.device('meta'):`, or `zero.Init`.
    utils.init_on_device
    deepspeed utils: OnDevice
Every layer runs on every token in every step; drop them in the model.
    runtime.progressive_layer_drop runtime.data_pipeline.data_routing
    engine: get_pld_theta
Order the samples in the loader.
    runtime.data_pipeline
    engine: set_custom_curriculum_learning_schedule
Call `torch.compile` on the model's blocks.
    compile runtime.compiler
    deepspeed: is_compile_supported
Use AdamW, or without ZeRO an optimizer of `torch.optim`.
    ops.adagrad ops.lamb runtime.fp16.onebit
    ops.adam: ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3
Gradients are dense: use `sparse=False`.
    runtime.sparse_tensor
Nothing is scheduled by curvature here.
    runtime.eigenvalue
Nothing is offloaded to NVMe.
    nvme ops.aio runtime.swap_tensor
Ask `engine.zero_optimization_stage()`; the optimizer of every stage is `DeepSpeedOptimizer`.
    runtime.bf16_optimizer runtime.fp16
The scale is the engine's: read `optimizer.loss_scaler`, set it in the config's `fp16` block.
    runtime.fp16.loss_scaler
Use `zerodrift.load(file)`, which checks every key.
    runtime.config_utils runtime.precision_config
    deepspeed runtime.config: DeepSpeedConfig
    runtime.zero.config: DeepSpeedZeroConfig get_zero_config read_zero_config_deprecated
    runtime.zero.offload_config: DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig
Use `csv_monitor`, `tensorboard` or `wandb`.
    monitor.comet
    monitor.config: CometConfig
Use `torch.profiler`, with `with_flops=True` for a count.
    utils.timer profiling
    engine: get_wall_clock_timers timers flops_profiler
Call `engine.save_checkpoint`, which writes and checks every file.
    checkpoint.utils: get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank
        get_zero_ckpt_name_for_rank
    nebula checkpoint.constants runtime.checkpoint_engine runtime.state_dict_factory
Every checkpoint loads on any number of ranks, at any stage: there is nothing to convert.
    checkpoint
Use `zerodrift.initialize` with `pipeline: {schedule: dualpipev}`.
    deepspeed: DualPipeVModule DualPipeVEngine
Write the schedule in the config's `scheduler` block.
    deepspeed runtime.lr_schedules: add_tuning_arguments
    runtime.lr_schedules: parse_arguments override_params get_config_from_args get_lr_from_config
Build the model inside `zero.Init`.
    param: convert_to_zero_parameters
Read or write it inside `zero.GatheredParameters`, with a `modifier_rank` to write.
    param: all_gather all_gather_coalesced partition
`engine.backward` and `engine.step` reduce; `safe_get_full_grad` has the gradient.
    param: reduce_gradients_at_owner partition_gradients
Use `zero.Init` and `zero.GatheredParameters`.
    runtime.zero.parameter_offload: ZeROOrderedDict ensure_zero_ordered_dict
    runtime.zero.partition_parameters: AllGatherCoalescedHandle AllGatherHandle CUDAQuantizer
        InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles get_allgather_dtype
        partitioned_param_data_shape zero3_linear_wrap
    runtime.zero.utils: apply_to_tensors_only
Annotate with `Callable[..., Any]`.
    deepspeed: DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable
Buffers and tensors stay what the model made them.
    zero runtime.zero: DeepSpeedTensorOverride
Ask `engine.torch_autocast_enabled()` and `engine.torch_autocast_dtype()`.
    runtime.torch_autocast: is_autocast_initialized get_autocast_dtype
Write `torch_autocast` in the config.
    runtime.torch_autocast: init_autocast_params
Call the engine, which enters autocast as its config says.
    runtime.torch_autocast: autocast_if_enabled
Use `torch.utils.checkpoint`, which restores torch's own random numbers.
    runtime.activation_checkpointing.checkpointing: CheckpointFunction gather_partitioned_activations
        partition_activations_in_checkpoint CudaRNGStatesTracker get_cuda_rng_tracker
        model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed set_num_layers
Write `gradient_clipping` in the config, and read `engine.get_global_grad_norm()`.
    runtime.utils: clip_grad_norm_ get_global_norm get_grad_norm
    engine: clip_fp32_gradients
Units and segments are the plan's.
    runtime.utils: partition_uniform partition_balanced PartitionedTensor
Use `get_fp32_state_dict_from_zero_checkpoint`, which reads checkpoints of both.
    utils.zero_to_fp32: get_optim_files get_model_state_file get_checkpoint_files parse_model_states
Use `zero_to_fp32`, and cast what it wrote.
    utils: zero_to_torch
Use `safe_get_full_fp32_param` and its kin.
    utils utils.tensor_fragment: get_full_hp_param link_hp_params set_full_hp_param fragment_address
        get_hp_fragment_mapping
    utils: get_full_hp_grad set_full_hp_grad lazy_init_hp_params_optimizer_state map_to_flat_opt_states
    utils.tensor_fragment: tensor_fragment
Use `inspect.stack`.
    utils: get_caller_func
Use torch's or Python's own.
    accelerator.cuda_accelerator comm.torch io ops.random_ltd runtime.constants
    utils.bwc utils.config utils.debug utils.exceptions utils.types
    runtime.utils: CheckOverflow empty_cache ensure_directory_exists get_ma_status memory_status
        noop_decorator set_random_seed
    utils.logging: LoggerFactory get_current_level print_json_dist should_log_le
Call `all_reduce` or `all_gather_into_tensor` per tensor.
    comm comm.comm: inference_all_reduce all_reduce_coalesced all_gather_coalesced
Use `torch.distributed`'s own.
    comm comm.comm: P2POp TorchBackend batch_isend_irecv enable_symm_mem_for_group
        initialize_mesh_device timed_op
Call `engine.compile`, which has no passes of DeepCompile.
    engine: register_compile_pass
Checkpoint and `destroy`, or use `zero_optimization.offload_optimizer`.
    engine: offload_states reload_states
`backward` and `step` reduce; `no_sync` puts it off.
    engine: allreduce_gradients
Experts are saved and loaded with the rest.
    engine: load_moe_state_dict
Call the engine, `backward` and `step` for each micro-batch.
    engine: train_batch eval_batch set_dataloader set_dataiterator set_batch_fn reset_activation_shape
"""
"""Advice -> names that zerodrift does not have. A line without names lists modules that are wholly absent, as
are all unlisted modules below them."""
