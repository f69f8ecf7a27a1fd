// A PrivateUse1 device for tests. Operators run on the CPU, in memory that the host cannot touch outside of them.
//
// Asynchrony. A stream is a queue of copies, event records and event waits. Work runs when something waits for it: a host
// synchronisation, an event wait of a stream that is waited for, or an operator of the same stream (operators run at their call,
// after all earlier work of their stream). So a copy completes at the latest moment that a correct program allows.
//
// Order. Every stream and every host thread has a vector clock: how much of each stream's work precedes its next action. An
// access of a block of memory that is not ordered after the last write (or, for a write, after all reads) by another stream is a
// violation, whatever values it saw. `record_stream` orders the accesses of a stream before the reuse of a freed block.
//
// Memory. Blocks of the device are PROT_NONE outside of operators. Page-locked host memory is read-only while a copy from it, and
// PROT_NONE while a copy to it, may be pending, which ends with a host synchronisation that covers the copy.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Storage;
using torch::jit::Stack;
using Lock = std::lock_guard<std::recursive_mutex>;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr int kHost = -1;
constexpr size_t kPage = 4096;

std::recursive_mutex& mutex() {
  static auto* one = new std::recursive_mutex;  // outlives tensors that are freed at exit
  return *one;
}

// Clocks, streams and events

using Clock = std::vector<uint64_t>;  // by stream: number of its actions

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

struct StreamState {
  DeviceIndex device;
  Clock clock;
  std::deque<std::function<void()>> queue;
  uint64_t done = 0;  // items of the queue that ran
};

struct Mark {  // a recorded event
  int stream;
  uint64_t position;
  Clock clock;
  bool done = false;
  std::chrono::steady_clock::time_point time;
};

struct Event {
  std::shared_ptr<Mark> mark;
};

std::deque<StreamState>& streams() {  // the first ones are the devices' default streams
  static auto* all = [] {
    auto* made = new std::deque<StreamState>;
    for (DeviceIndex device = 0; device < kDevices; device++) made->push_back({device, Clock(kDevices)});
    return made;
  }();
  return *all;
}

thread_local Clock host_clock;
thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, c10::StreamId> current_streams;

c10::Stream current_stream(DeviceIndex device) {
  auto found = current_streams.find(device);
  return c10::Stream(c10::Stream::UNSAFE, Device(kType, device), found == current_streams.end() ? 0 : found->second);
}
int index_of(const c10::Stream& stream) {
  return stream.id() ? static_cast<int>(stream.id()) : stream.device_index();
}

void run_until(int stream, uint64_t position) {
  auto& one = streams()[stream];
  while (one.done < position && !one.queue.empty()) {
    auto item = std::move(one.queue.front());
    one.queue.pop_front();
    item();
    one.done++;
  }
}
void run_all(int stream) {
  run_until(stream, streams()[stream].done + streams()[stream].queue.size());
}
void enqueue(int stream, std::function<void()> item) {
  streams()[stream].queue.push_back(std::move(item));
}

// Counts the next action of a stream, which follows what this host thread has waited for.
void launch(int stream) {
  auto& clock = streams()[stream].clock;
  join(clock, host_clock);
  clock.resize(std::max<size_t>(clock.size(), stream + 1));
  clock[stream]++;
}

// Reports

std::vector<std::string>& violations() {
  static auto* all = new std::vector<std::string>;
  return *all;
}
template <typename... Parts>
void report(const Parts&... parts) {
  violations().push_back(c10::str(parts...));
}

std::map<std::string, int64_t>& host_syncs() {
  static auto* all = new std::map<std::string, int64_t>;
  return *all;
}
thread_local int unobserved = 0;

// Autograd passes this kind of information on to its threads, and so the prohibition.
bool forbids_syncs() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO) != nullptr;
}
void host_sync(const std::string& what) {
  if (unobserved) return;
  TORCH_CHECK(!forbids_syncs(), "host synchronisation by ", what);
  host_syncs()[what]++;
}

// Memory

struct Access {
  uint64_t tick;
  std::string by;
};
struct Block {
  char* data;
  size_t mapped;
  int device;  // or kHost
  int stream;  // that it was allocated on
  size_t size = 0;
  int open = 0;     // operators that use it
  int pending = 0;  // queued copies that use it
  bool freed = false;
  int writer = -1;
  Access written{};
  std::map<int, Access> reads{};            // by stream
  std::set<int> recorded{};                 // streams of record_stream
  std::map<int, Access> from{}, to{};       // host memory: copies from it and to it, by stream
};

struct Memory {
  std::map<uintptr_t, Block*> blocks;  // by address
  std::map<std::tuple<int, int, size_t>, std::vector<Block*>> free;
  std::set<Block*> locked;  // host blocks with protection
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
  size_t cap[kDevices] = {size_t(1) << 40, size_t(1) << 40};
};
Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

void protect(Block* block, int protection) {
  TORCH_CHECK(mprotect(block->data, block->mapped, protection) == 0, "mprotect: ", strerror(errno));
}
void open_block(Block* block) {
  if (block->open++ == 0) protect(block, PROT_READ | PROT_WRITE);
}
void close_block(Block* block) {
  if (--block->open == 0) protect(block, PROT_NONE);
}
void protect_host(Block* block) {
  const bool is_locked = !block->from.empty() || !block->to.empty();
  is_locked ? (void)memory().locked.insert(block) : (void)memory().locked.erase(block);
  protect(block, !block->to.empty() ? PROT_NONE : is_locked ? PROT_READ : PROT_READ | PROT_WRITE);
}

void host_join(const Clock& clock) {
  join(host_clock, clock);
  auto is_known = [](const auto& item) {
    return static_cast<size_t>(item.first) < host_clock.size() && item.second.tick <= host_clock[item.first];
  };
  for (auto* block : std::set<Block*>(memory().locked)) {
    if (std::erase_if(block->from, is_known) + std::erase_if(block->to, is_known)) protect_host(block);
  }
}

Block* find_block(const void* address) {
  auto& blocks = memory().blocks;
  auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == blocks.begin()) return nullptr;
  auto* block = std::prev(after)->second;
  return address < block->data + block->mapped ? block : nullptr;
}

void put_free(Block* block) {
  if (block->device == kHost) {
    block->from.clear(), block->to.clear();
    protect_host(block);
  } else {
    open_block(block);
    memset(block->data, 0xff, block->mapped);  // NaN in every floating-point type
    close_block(block);
  }
  memory().free[{block->device, block->stream, block->mapped}].push_back(block);
}

void free_block(void* context) {
  Lock lock(mutex());
  auto* block = static_cast<Block*>(context);
  if (block->device != kHost) memory().stats[block->device].allocated_bytes[0].decrease(block->size);
  // The allocator waits for the recorded streams. What other streams did stays on record for the next owner.
  for (int stream : block->recorded) {
    block->reads.erase(stream);
    if (block->writer == stream) block->writer = -1;
  }
  block->recorded.clear();
  block->freed = true;
  if (!block->pending) put_free(block);
}

c10::DataPtr allocate_block(size_t bytes, int device, int stream) {
  Lock lock(mutex());
  auto place = device == kHost ? Device(c10::kCPU) : Device(kType, static_cast<DeviceIndex>(device));
  if (!bytes && device != kHost) return {nullptr, nullptr, &c10::detail::deleteNothing, place};
  const size_t size = (bytes + 511) / 512 * 512, mapped = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (device != kHost) {
    auto& used = memory().stats[device].allocated_bytes[0];
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        used.current + size <= memory().cap[device],
        "virtual out of memory. Tried to allocate ", bytes, " bytes. Device ", device, " has a total capacity of ",
        memory().cap[device], " bytes of which ", memory().cap[device] - used.current, " bytes are free.");
    used.increase(size);
  }
  auto& reusable = memory().free[{device, stream, mapped}];
  Block* block;
  if (reusable.empty()) {
    void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "mmap of ", mapped, " bytes: ", strerror(errno));
    block = new Block{static_cast<char*>(data), mapped, device, stream};
    memset(data, 0xff, mapped);
    memory().blocks[reinterpret_cast<uintptr_t>(data)] = block;
    if (device != kHost) protect(block, PROT_NONE);
  } else {
    block = reusable.back();
    reusable.pop_back();
  }
  block->size = size;
  block->freed = false;
  return {block->data, block, &free_block, place};
}

void hold(Block* block) {
  block->pending++;
}
void release(Block* block) {
  if (--block->pending == 0 && block->freed) put_free(block);
}

// Checks and records the access of a stream's latest action.
void access(Block* block, int stream, bool is_write, const std::string& by) {
  const auto& clock = streams()[stream].clock;
  auto is_ordered = [&](int other, uint64_t tick) {
    return other == stream || (static_cast<size_t>(other) < clock.size() && tick <= clock[other]);
  };
  if (block->writer >= 0 && !is_ordered(block->writer, block->written.tick))
    report(by, " on stream ", stream, " does not wait for ", block->written.by, " on stream ", block->writer);
  if (is_write) {
    for (auto& [reader, read] : block->reads)
      if (!is_ordered(reader, read.tick))
        report(by, " on stream ", stream, " overwrites what ", read.by, " on stream ", reader, " may still read");
    block->reads.clear();
    block->writer = stream;
    block->written = {clock[stream], by};
  } else {
    block->reads[stream] = {clock[stream], by};
  }
}

Block* block_of(const Tensor& tensor) {
  auto* context = tensor.storage().data_ptr().get_context();
  if (!context) return nullptr;
  return tensor.device().type() == kType ? static_cast<Block*>(context) : find_block(tensor.storage().data());
}

struct sigaction previous_action;

void on_segfault(int number, siginfo_t* info, void* context) {
  {
    Lock lock(mutex());
    if (auto* block = find_block(info->si_addr)) {
      if (block->device == kHost)
        report("the host touches page-locked memory that a pending copy uses");
      else
        report("the host touches memory of device ", block->device);
      protect(block, PROT_READ | PROT_WRITE);
      return;
    }
  }
  sigaction(SIGSEGV, &previous_action, nullptr);  // the access is repeated
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_block(bytes, current_device, index_of(current_stream(current_device)));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data of device memory"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex());
    if (data.get_context()) static_cast<Block*>(data.get_context())->recorded.insert(index_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override { return memory().stats[device]; }
  void resetAccumulatedStats(DeviceIndex device) override { memory().stats[device].allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override { memory().stats[device].allocated_bytes[0].reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    auto cap = memory().cap[device];
    return {cap - memory().stats[device].allocated_bytes[0].current, cap};
  }
};
struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_block(bytes, kHost, 0); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
DeviceMemory device_memory;
HostMemory host_memory;

// torch's interfaces

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "invalid device ", device);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(Device device) const override {
    return current_stream(device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(Device device, int = 0) const override {
    Lock lock(mutex());
    auto index = device.index() < 0 ? current_device : device.index();
    streams().push_back({index, Clock(streams().size() + 1)});
    return c10::Stream(c10::Stream::UNSAFE, Device(kType, index), static_cast<c10::StreamId>(streams().size() - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex());
    return streams()[index_of(stream)].queue.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_sync("Stream.synchronize");
    sync(index_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    host_sync("synchronize");
    for (size_t i = 0; i < streams().size(); i++)
      if (streams()[i].device == device) sync(static_cast<int>(i));
  }
  static void sync(int stream) {
    Lock lock(mutex());
    run_all(stream);
    host_join(streams()[stream].clock);
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex());
    const int index = index_of(stream);
    auto& one = streams()[index];
    if (!*event) *event = new Event;
    join(one.clock, host_clock);
    auto mark = std::make_shared<Mark>(Mark{index, one.done + one.queue.size() + 1, one.clock});
    enqueue(index, [mark] {
      mark->done = true;
      mark->time = std::chrono::steady_clock::now();
    });
    if (one.queue.size() == 1) run_all(index);
    static_cast<Event*>(*event)->mark = mark;
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex());
    auto mark = event ? static_cast<Event*>(event)->mark : nullptr;
    if (!mark) return;
    join(streams()[index_of(stream)].clock, mark->clock);
    enqueue(index_of(stream), [mark] { run_until(mark->stream, mark->position); });
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex());
    auto mark = event ? static_cast<Event*>(event)->mark : nullptr;
    if (!mark) return true;
    if (mark->done) {
      host_join(mark->clock);
      return true;
    }
    run_until(mark->stream, streams()[mark->stream].done + 1);  // a program that only asks makes progress, too
    return false;
  }
  void synchronizeEvent(void* event) const override {
    auto mark = event ? static_cast<Event*>(event)->mark : nullptr;
    if (!mark) return;
    host_sync("Event.synchronize");
    Lock lock(mutex());
    run_until(mark->stream, mark->position);
    host_join(mark->clock);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    Lock lock(mutex());
    auto *first = static_cast<Event*>(begin)->mark.get(), *last = static_cast<Event*>(end)->mark.get();
    TORCH_CHECK(first->done && last->done, "elapsed_time of an event that is not complete");
    return std::chrono::duration<double, std::milli>(last->time - first->time).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  Device getDeviceFromPtr(void* data) const override {
    Lock lock(mutex());
    auto* block = find_block(data);
    TORCH_CHECK(block && block->device != kHost, "not memory of the device");
    return {kType, static_cast<DeviceIndex>(block->device)};
  }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(mutex());
    auto* block = find_block(data);
    return block && block->device == kHost;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    TORCH_CHECK(!bytes || !storage.nbytes(), "only memory without content can be resized");  // FSDP frees and allocates weights
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(device_memory.allocate(bytes));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Operators

Tensor make_view(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.value_or(self.storage_offset()));
  return made;
}

// A CPU tensor over the memory of a tensor of the device; it does not own the memory.
Tensor alias(const Tensor& tensor) {
  auto& storage = tensor.storage();
  auto* data = const_cast<void*>(storage.data());
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      Storage(Storage::use_byte_size_t(), storage.nbytes(), at::DataPtr(data, Device(c10::kCPU)), nullptr, false),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

at::TensorBase make_host(at::IntArrayRef sizes, at::ScalarType type) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::detail::empty_generic(sizes, c10::GetAllocator(c10::kCPU), keys, type, std::nullopt);
}

Tensor make_empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, DeviceIndex device) {
  const c10::DeviceGuard guard(Device(kType, device));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

const std::set<std::string> kSyncs = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::bincount", "aten::histc"};
struct Call {
  const std::string name;
  std::vector<Tensor> given{}, aliases{};
  std::vector<bool> writes{};
  std::vector<Tensor> host{};
  bool is_index = false;  // of the argument
  bool syncs = false;
  std::optional<DeviceIndex> device{};
  int stream = 0;

  Tensor to_host(const Tensor& tensor, bool is_write) {
    if (!tensor.defined()) return tensor;
    // CUDA, too, takes indices from the host, and counts those that are set in a mask.
    if (is_index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) syncs = true;
    if (tensor.device().type() != kType) {
      if (is_index && tensor.dim()) syncs = true;
      TORCH_CHECK(tensor.dim() == 0 || is_index, name, ": expected all tensors on the virtual device, found one on ", tensor.device());
      return tensor;
    }
    TORCH_CHECK(
        device.value_or(tensor.device().index()) == tensor.device().index(), name, ": tensors on devices ", *device, " and ",
        tensor.device().index());
    device = tensor.device().index();
    given.push_back(tensor);
    // An empty output may be resized by the operator.
    const bool is_resized = is_write && !tensor.numel();
    aliases.push_back(is_resized ? Tensor(make_host(tensor.sizes(), tensor.scalar_type())) : alias(tensor));
    writes.push_back(is_write);
    return aliases.back();
  }

  Tensor to_device(const Tensor& tensor, bool is_output = false) {
    if (!tensor.defined()) return tensor;
    for (size_t i = 0; i < given.size() && !is_output; i++) {
      if (aliases[i].unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return given[i];
      if (tensor.storage().data() && aliases[i].storage().data() == tensor.storage().data())
        return make_view(given[i], tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
    const bool is_dense = tensor.is_non_overlapping_and_dense();
    auto values = is_dense ? tensor : tensor.contiguous();
    auto made = make_empty(values.sizes(), values.strides(), values.scalar_type(), device.value_or(current_device));
    Lock lock(mutex());
    if (auto* block = block_of(made)) {
      access(block, stream, true, name);
      open_block(block);
      memcpy(block->data, values.const_data_ptr(), values.nbytes());
      close_block(block);
    }
    return made;
  }
};

struct Opened {  // the memory of a call
  std::vector<Block*> blocks;
  ~Opened() {
    Lock lock(mutex());
    for (auto* block : blocks) close_block(block);
  }
};

template <typename Convert>
IValue convert_tensors(const IValue& value, Convert convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& one : value.toTensorVector()) made.push_back(convert(one));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& one : value.toOptionalTensorVector())
      made.push_back(one ? std::optional<Tensor>(convert(*one)) : std::nullopt);
    return made;
  }
  return value;
}

// Runs an operator of the CPU on the memory of the device.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  Call call{c10::toString(op.operator_name())};
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    const bool is_write = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    call.is_index = arguments[i].name() == "indices" && value.isOptionalTensorList();
    value = value.isDevice() ? IValue(Device(c10::kCPU))
                             : convert_tensors(value, [&](const Tensor& one) { return call.to_host(one, is_write); });
  }
  if (call.syncs || kSyncs.count(call.name)) {
    host_sync(call.name);
    Guard::sync(index_of(current_stream(call.device.value_or(current_device))));
  }
  {
    Opened opened;
    {
      Lock lock(mutex());
      call.stream = index_of(current_stream(call.device.value_or(current_device)));
      run_all(call.stream);
      launch(call.stream);
      for (size_t i = 0; i < call.given.size(); i++) {
        if (auto* block = block_of(call.given[i])) {
          access(block, call.stream, call.writes[i], call.name);
          open_block(block);
          opened.blocks.push_back(block);
        }
      }
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (size_t i = 0; i < call.given.size(); i++) {
    if (!call.writes[i] || call.given[i].numel() || !call.aliases[i].numel()) continue;
    auto made = call.to_device(call.aliases[i], true);
    auto* impl = call.given[i].unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(Storage(made.storage()));
    impl->set_sizes_and_strides(made.sizes(), made.strides(), 0);
  }
  const size_t returned = stack->size() - op.schema().returns().size();
  for (size_t i = returned; i < stack->size(); i++)
    (*stack)[i] = convert_tensors((*stack)[i], [&](const Tensor& one) { return call.to_device(one); });
}

void call_instead(const char* name, Stack* stack) {
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}
void convolution(const c10::OperatorHandle&, Stack* stack) {
  call_instead("aten::convolution", stack);
}
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  const auto channels = first->toTensor().size(1);
  stack->insert(first + 3, IValue(std::vector<int64_t>{channels}));
  call_instead("aten::convolution_backward", stack);
}

Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(kType, current_device)));
  return at::detail::empty_generic(
      sizes, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type.value_or(at::kFloat), format);
}
Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const auto index = device && device->index() >= 0 ? device->index() : current_device;
  return make_empty(sizes, strides, type.value_or(at::kFloat), index);
}
void record_stream(Tensor& self, c10::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

// Queues a copy of bytes on a stream.
void queue_copy(int stream, const Tensor& to, const Tensor& from, bool is_to_device) {
  Lock lock(mutex());
  auto *device = block_of(is_to_device ? to : from), *host = block_of(is_to_device ? from : to);
  if (!device || !to.numel()) return;
  const std::string name = is_to_device ? "copy to the device" : "copy to the host";
  launch(stream);
  access(device, stream, is_to_device, name);
  auto* target = static_cast<char*>(const_cast<void*>(to.storage().data())) + to.storage_offset() * to.itemsize();
  const auto* source = static_cast<const char*>(from.storage().data()) + from.storage_offset() * from.itemsize();
  const size_t bytes = to.nbytes();
  hold(device);
  if (host) {
    hold(host);
    auto& uses = is_to_device ? host->from : host->to;
    uses[stream] = {streams()[stream].clock[stream], name};
    protect_host(host);
  }
  enqueue(stream, [=] {
    open_block(device);
    if (host && !is_to_device) protect(host, PROT_READ | PROT_WRITE);
    memcpy(target, source, bytes);
    if (host && !is_to_device) protect_host(host);
    close_block(device);
    release(device);
    if (host) release(host);
  });
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  const bool from_device = self.device().type() == kType, to_device = dst.device().type() == kType;
  if (from_device && to_device) {
    if (self.device() == dst.device()) {
      static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
      Stack stack{dst, self.expand(dst.sizes()), non_blocking};
      fallback(op, &stack);
      return dst;
    }
    unobserved++;  // between devices: both current streams take part
    auto host = self.cpu();
    dst.copy_(host);
    unobserved--;
    return dst;
  }
  const int stream = index_of(current_stream((to_device ? dst : self).device().index()));
  const auto& there = to_device ? dst : self;
  if (self.sizes() != dst.sizes() || self.dtype() != dst.dtype() || !self.is_contiguous() || !dst.is_contiguous()) {
    auto source = self.expand(dst.sizes()).contiguous();  // a part of the transfer on its own side, as in CUDA
    if (to_device) {
      auto made = make_empty(source.sizes(), source.strides(), source.scalar_type(), there.device().index());
      copy_from(source, made, non_blocking);
      return copy_from(made, dst, non_blocking);
    }
    auto converted = source.to(dst.scalar_type());
    if (dst.is_contiguous()) return copy_from(converted, dst, non_blocking);
    const Tensor host(make_host(dst.sizes(), dst.scalar_type()));
    copy_from(converted, host, false);
    dst.copy_(host);
    return dst;
  }
  const auto& host = to_device ? self : dst;
  bool is_pinned;
  {
    Lock lock(mutex());
    is_pinned = block_of(host) != nullptr;
  }
  const bool waits = !non_blocking || !is_pinned;
  if (waits) host_sync(to_device ? "copy to the device" : "copy to the host");
  queue_copy(stream, dst, self, to_device);
  if (waits) Guard::sync(stream);
  return dst;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Operators with a kernel of the CPU beside a generic one: the CPU's, so that values are equal.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasSchema() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &make_view);
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

const int registered = [] {
  c10::SetAllocator(kType, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  struct sigaction action {};
  action.sa_sigaction = on_segfault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGSEGV, &action, &previous_action);
}();

}  // namespace

// For Python's ctypes.
extern "C" {
void* vd_forbid_syncs() {
  return new c10::DebugInfoGuard(c10::DebugInfoKind::TEST_INFO, std::make_shared<c10::DebugInfoBase>());
}
void vd_allow_syncs(void* guard) { delete static_cast<c10::DebugInfoGuard*>(guard); }
void vd_unobserved(int change) { unobserved += change; }
void vd_set_cap(int device, uint64_t bytes) { memory().cap[device] = bytes; }
// Lines of text; valid until the next call.
const char* vd_violations() {
  static std::string text;
  Lock lock(mutex());
  text.clear();
  for (const auto& one : violations()) text += one + "\n";
  return text.c_str();
}
const char* vd_host_syncs() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : host_syncs()) text += c10::str(count, " ", name, "\n");
  return text.c_str();
}
void vd_clear() {
  Lock lock(mutex());
  violations().clear();
  host_syncs().clear();
}
}
