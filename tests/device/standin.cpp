// A device that is not here: torch's PrivateUse1 backend over host memory, with streams, events and a caching allocator.
//
// Memory is mapped twice. Tensors have the addresses of the first mapping, which nobody may touch, so host code that reads
// a device's memory dies at once. Kernels use the second. What is issued to streams (allocations, frees, events, waits) is
// appended to one log, in the order of the calls; `standin.py` reads it before each launch, and decides when work runs.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex devices = 4;
constexpr size_t space = size_t(1) << 42;  // of addresses; memory is what kernels touch of it
constexpr size_t granule = 512;  // what CUDA's allocator rounds to

// --- the log -----------------------------------------------------------------------------------------------

struct Entry {
  char what;  // a: allocate, f: free, e: record event, w: stream waits for event
  int64_t stream;
  int64_t first;  // address, or number of the event
  int64_t second;  // bytes, or version of the event
};

std::mutex mutex;
std::vector<Entry> entries;
py::object* on_call = nullptr;  // called where the host waits or memory is allocated: (what, number, version)

void note(char what, int64_t stream, int64_t first, int64_t second) {
  entries.push_back({what, stream, first, second});
}

void call_host(const char* what, int64_t number, int64_t version = 0) {
  py::gil_scoped_acquire gil;
  if (on_call != nullptr) (*on_call)(what, number, version);
}

// --- memory ------------------------------------------------------------------------------------------------

char* device_base = nullptr;
char* host_base = nullptr;

void map_memory() {
  int file = memfd_create("standin", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, space) == 0, "no memory for the stand-in device");
  device_base = static_cast<char*>(mmap(nullptr, space, PROT_NONE, MAP_SHARED, file, 0));
  host_base = static_cast<char*>(mmap(nullptr, space, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
  close(file);
  TORCH_CHECK(device_base != MAP_FAILED && host_base != MAP_FAILED, "no address space for the stand-in device");
}

bool on_device(const void* address) {
  auto at = static_cast<const char*>(address);
  return device_base != nullptr && at >= device_base && at < device_base + space;
}

struct Block {
  size_t bytes;
  int64_t stream;
  bool free;
  std::set<int64_t> others;  // streams that `record_stream` named
};

std::map<size_t, Block> blocks;  // offset -> block, neighbours in order
std::vector<size_t> deferred;  // freed, but named by `record_stream`
size_t end_of_memory = 0;
size_t allocated = 0, most_allocated = 0, most_reserved = 0;  // bytes; a process uses one device

thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_stream[devices] = {0};

void release(size_t offset) {
  auto at = blocks.find(offset);
  at->second.free = true;
  at->second.others.clear();
  auto merge = [](std::map<size_t, Block>::iterator left, std::map<size_t, Block>::iterator right) {
    if (!left->second.free || !right->second.free || left->second.stream != right->second.stream) return false;
    left->second.bytes += right->second.bytes;
    blocks.erase(right);
    return true;
  };
  if (auto next = std::next(at); next != blocks.end()) merge(at, next);
  if (at != blocks.begin()) merge(std::prev(at), at);
}

void free_memory(void* context) {
  std::lock_guard<std::mutex> lock(mutex);
  size_t offset = reinterpret_cast<size_t>(context) - 1;
  auto& block = blocks.at(offset);
  allocated -= block.bytes;
  note('f', block.stream, reinterpret_cast<int64_t>(device_base + offset), block.bytes);
  if (block.others.empty()) release(offset); else deferred.push_back(offset);
}

struct CachingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kind, current_device);
    if (bytes == 0) return {nullptr, device};
    auto data = take(bytes, device);
    call_host("allocation", 0);
    return data;
  }
  static c10::DataPtr take(size_t bytes, c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex);
    size_t size = (bytes + granule - 1) / granule * granule;
    int64_t stream = current_stream[current_device];
    auto best = blocks.end();
    for (auto at = blocks.begin(); at != blocks.end(); ++at) {
      const auto& block = at->second;
      bool fits = block.free && block.stream == stream && block.bytes >= size;
      if (fits && (best == blocks.end() || block.bytes < best->second.bytes)) best = at;
    }
    size_t offset;
    if (best == blocks.end()) {
      offset = end_of_memory;
      TORCH_CHECK_WITH(OutOfMemoryError, offset + size <= space, "the stand-in device has no memory for ", bytes, " bytes");
      end_of_memory += size;
      blocks[offset] = {size, stream, false, {}};
    } else {
      offset = best->first;
      size_t rest = best->second.bytes - size;
      best->second.free = false;
      best->second.bytes = size;
      if (rest > 0) blocks[offset + size] = {rest, stream, true, {}};
    }
    allocated += size;
    most_allocated = std::max(most_allocated, allocated);
    most_reserved = std::max(most_reserved, end_of_memory);
    void* address = device_base + offset;
    note('a', stream, reinterpret_cast<int64_t>(address), size);
    return {address, reinterpret_cast<void*>(offset + 1), &free_memory, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    TORCH_CHECK(false, "the stand-in device copies by operations only");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    c10::impl::getDeviceGuardImpl(kind)->recordDataPtrOnStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = allocated;
    all.peak = most_allocated;
    auto& held = stats.reserved_bytes[0];
    held.current = end_of_memory;
    held.peak = most_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    most_allocated = allocated;
    most_reserved = end_of_memory;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {space - end_of_memory, space}; }
};

CachingAllocator allocator;
REGISTER_ALLOCATOR(kind, &allocator);

// --- streams and events ------------------------------------------------------------------------------------

struct Event {
  int64_t number;
  int64_t version;
};

int64_t streams_made = 0, events_made = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kind, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < devices, "no stand-in device ", device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  static c10::Stream stream_of(c10::DeviceIndex index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kind, index), id);
  }
  static c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    auto index = index_of(device);
    return stream_of(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard<std::mutex> lock(mutex);
    return stream_of(index_of(device), ++streams_made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> lock(mutex);
    if (*event == nullptr) *event = new Event{++events_made, 0};
    auto at = static_cast<Event*>(*event);
    note('e', stream.id(), at->number, ++at->version);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex);
    auto at = static_cast<Event*>(event);
    note('w', stream.id(), at->number, at->version);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto at = static_cast<Event*>(event);
    call_host("event", at->number, at->version);
  }
  void synchronizeStream(const c10::Stream& stream) const override { call_host("stream", stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    call_host("device", 0);
    std::lock_guard<std::mutex> lock(mutex);
    for (auto offset : deferred) release(offset);
    deferred.clear();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex);
    blocks.at(reinterpret_cast<size_t>(data.get_context()) - 1).others.insert(stream.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- random numbers ----------------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl({kind, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
  at::Generator host;
};

at::Generator make_generator(c10::DeviceIndex index) { return at::make_generator<Generator>(index); }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < devices; ++i) made.push_back(make_generator(i));
    return made;
  }();
  return all[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index < 0 ? current_device : index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(index < 0 ? 0 : index); }
  at::Device getDeviceFromPtr(void* data) const override { return {kind, current_device}; }
  bool isPinnedPtr(const void* data) const override;
  at::Allocator* getPinnedMemoryAllocator() const override;
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    call_host("resize", 0);
    auto grown = allocator.allocate(bytes);
    auto view = [](const void* address) { return static_cast<char*>(const_cast<void*>(address)) - device_base + host_base; };
    if (storage.nbytes() > 0) memcpy(view(grown.get()), view(storage.data()), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// --- page-locked memory of the host ------------------------------------------------------------------------

std::map<const char*, size_t> pinned;

void free_pinned(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(static_cast<const char*>(address));
  free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, bytes) == 0, "no page-locked memory");
    std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<const char*>(address)] = bytes;
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto at = std::prev(after);
  return static_cast<const char*>(data) < at->first + at->second;
}

bool Hooks::isPinnedPtr(const void* data) const { return is_pinned(data); }
at::Allocator* Hooks::getPinnedMemoryAllocator() const { return &pinned_allocator; }

// --- operations that only make tensors ---------------------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kind, current_device)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kind, current_device)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           at::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> at) {
  return at::cpu::as_strided(self, size, stride, at);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t numel = c10::multiply_integers(size);
  size_t bytes = (self.storage_offset() + numel) * self.itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t at, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, at, size, stride);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::impl::getDeviceGuardImpl(kind)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

at::Tensor& set_whole(at::Tensor& self, at::Storage storage) { return at::native::set_(self, storage); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#undef FP32
}

// --- what `standin.py` calls -------------------------------------------------------------------------------

at::Tensor host_view(const at::Tensor& self) {
  if (self.storage().data() == nullptr) return at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
  auto address = static_cast<char*>(self.data_ptr()) - device_base + host_base;
  return at::from_blob(address, self.sizes(), self.strides(), self.options().device(at::kCPU));
}

py::list drain() {
  std::vector<Entry> taken;
  {
    std::lock_guard<std::mutex> lock(mutex);
    taken.swap(entries);
  }
  py::list out;
  for (const auto& entry : taken) out.append(py::make_tuple(std::string(1, entry.what), entry.stream, entry.first, entry.second));
  return out;
}

// Autograd makes its threads in the first backward of a process, one for each device that there is by then. They are not
// forked, and the flag is, so a process whose parent has run a backward has none.
struct Backward : torch::autograd::Engine {
  using Engine::start_device_threads;
};

void start_backward_threads() { (torch::autograd::Engine::get_default_engine().*&Backward::start_device_threads)(); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  map_memory();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("host_view", &host_view);
  m.def("drain", &drain);
  m.def("start_backward_threads", &start_backward_threads);
  m.def("on_call", [](py::object function) { on_call = new py::object(std::move(function)); });
  m.def("is_pinned", [](int64_t address) { return is_pinned(reinterpret_cast<const void*>(address)); });
  m.def("host_generator", [](const at::Generator& generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
  });
  m.def("default_generator", [](int index) { return default_generator(index); });
}
