// Two devices that are no CPU, for tests: `sim:0` and `sim:1`, of torch's kind PrivateUse1.
//
// Each operator runs the CPU's kernel. The memory is mapped twice: at the addresses of the device,
// which nothing may read or write, and at others, which only the kernels here are shown.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 2;

// ---- what is counted ----------------------------------------------------------------------------

struct Counters {
  std::atomic<int64_t> launches{0}, reads{0}, to_host{0}, to_device{0}, between{0}, waits{0};
  std::atomic<int64_t> events{0}, blocks{0};
} counters;
std::atomic<bool> waiting_is_an_error{false}, float64_is_an_error{false}, names_are_kept{false};
std::mutex names_lock;
std::vector<std::string> names;

void launch(const std::string& name) {
  ++counters.launches;
  if (names_are_kept) {
    std::lock_guard<std::mutex> lock(names_lock);
    names.push_back(name);
  }
}

void wait(std::atomic<int64_t>& counter, const std::string& why) {
  ++counter;
  TORCH_CHECK(!waiting_is_an_error, "the host waits for the device: ", why);
}

// ---- memory -------------------------------------------------------------------------------------

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memmove(shown(to), shown(from), bytes);
  }
  // The address at which a kernel finds what the device has at this one.
  char* shown(const void* address) const {
    return const_cast<char*>(static_cast<const char*>(address)) + (kernels_ - device_);
  }
  c10::DeviceIndex device_of(const void* address) {
    std::lock_guard<std::mutex> lock(lock_);
    auto block = blocks_.find(static_cast<char*>(const_cast<void*>(address)));
    return block == blocks_.end() ? 0 : block->second.device;
  }

 private:
  struct Block {
    size_t bytes;
    c10::DeviceIndex device;
  };
  static constexpr size_t LIMIT = size_t(8) << 30;
  static void release(void* address);
  void map();

  std::mutex lock_;
  char *device_ = nullptr, *kernels_ = nullptr;
  size_t end_ = 0;
  std::map<char*, Block> blocks_;
  std::map<size_t, std::vector<char*>> free_;
};

Memory& memory() {
  static auto* one = new Memory(); // tensors of a module may outlive everything static
  return *one;
}

thread_local c10::DeviceIndex current = 0;

void Memory::map() {
#ifdef __linux__
  const int file = memfd_create("sim", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, LIMIT) == 0, "no memory for the second device");
  auto mapped = [&](int rights) { return mmap(nullptr, LIMIT, rights, MAP_SHARED, file, 0); };
  void *device = mapped(PROT_NONE), *kernels = mapped(PROT_READ | PROT_WRITE);
  close(file);
#else // one mapping: a host's pointer into the memory of the device is not found there
  void* device = mmap(nullptr, LIMIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  void* kernels = device;
#endif
  TORCH_CHECK(device != MAP_FAILED && kernels != MAP_FAILED, "no memory for the second device");
  device_ = static_cast<char*>(device);
  kernels_ = static_cast<char*>(kernels);
}

c10::DataPtr Memory::allocate(size_t bytes) {
  size_t room = 64;
  while (room < bytes)
    room *= 2;
  std::lock_guard<std::mutex> lock(lock_);
  if (!device_)
    map();
  auto& fitting = free_[room];
  char* address = device_ + end_;
  if (fitting.empty()) {
    TORCH_CHECK(end_ + room <= LIMIT, "the second device is out of memory");
    end_ += room;
  } else {
    address = fitting.back();
    fitting.pop_back();
  }
  blocks_[address] = {room, current};
  ++counters.blocks;
  std::memset(shown(address), 0xff, bytes); // NaN: whoever reads what nobody wrote is found
  return {address, address, &release, c10::Device(SIM, current)};
}

void Memory::release(void* address) {
  auto& self = memory();
  std::lock_guard<std::mutex> lock(self.lock_);
  auto block = self.blocks_.find(static_cast<char*>(address));
  self.free_[block->second.bytes].push_back(block->first);
  self.blocks_.erase(block);
  --counters.blocks;
}

struct OnDevice { // the current device, for as long as this stands
  explicit OnDevice(c10::DeviceIndex index) : before(current) {
    TORCH_CHECK(index < DEVICES, "there is no sim:", int(index));
    current = index < 0 ? current : index;
  }
  ~OnDevice() {
    current = before;
  }
  c10::DeviceIndex before;
};

// ---- random numbers -----------------------------------------------------------------------------

// The CPU's generator under the name of the device. Its kernels want one that is called a CPU's.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator inner = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(SIM, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(device().index(), inner.clone());
  }
  at::Generator inner;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::vector<at::Generator> all{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(index < 0 ? current : index);
}

const at::Generator& inner(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// Lends the device's random numbers to kernels that take no generator.
struct LentNumbers {
  explicit LentNumbers(c10::DeviceIndex index)
      : cpu(at::detail::getDefaultCPUGenerator()), own(inner(default_generator(index))) {
    before = cpu.get_state();
    cpu.set_state(own.get_state());
  }
  ~LentNumbers() {
    own.set_state(cpu.get_state());
    cpu.set_state(before);
  }
  at::Generator cpu, own;
  at::Tensor before;
};

// ---- what torch asks of a device ----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return SIM;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {SIM, current};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index() < 0 ? current : device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  // One stream, on which everything has happened when the host goes on.
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(SIM, index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    ++counters.events;
    *event = &counters.events;
  }
  void block(void*, const c10::Stream&) const override {
    ++counters.events;
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {
    wait(counters.waits, "for an event");
  }
  void synchronizeStream(const c10::Stream&) const override {
    wait(counters.waits, "for a stream");
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    wait(counters.waits, "for everything");
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard().setDevice({SIM, index});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({SIM, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    return {SIM, memory().device_of(address)};
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    OnDevice on(storage.device().index());
    auto fresh = memory().allocate(bytes);
    memory().copy_data(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool registered = [] {
  c10::SetAllocator(SIM, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// ---- operators ----------------------------------------------------------------------------------

using Layout = std::optional<c10::Layout>;
using Where = std::optional<c10::Device>;
using DType = std::optional<c10::ScalarType>;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
constexpr c10::DispatchKeySet SPARSE(c10::DispatchKey::SparsePrivateUse1);

void check(c10::ScalarType dtype) {
  TORCH_CHECK(dtype != at::kDouble || !float64_is_an_error, "the device has no float64");
}

at::Tensor empty(
    c10::IntArrayRef size,
    DType dtype,
    Layout,
    Where device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  OnDevice on(device ? device->index() : -1);
  check(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(size, &memory(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    DType dtype,
    Layout,
    Where device,
    std::optional<bool>) {
  OnDevice on(device ? device->index() : -1);
  check(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(
      size, stride, &memory(), KEYS, c10::dtype_or_default(dtype));
}

void set_layout(const at::Tensor& to, const at::Tensor& like) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
}

// A tensor of the CPU over the memory of one of the device.
at::Tensor shown(const at::Tensor& tensor) {
  auto* address = memory().shown(tensor.storage().data());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      c10::DataPtr(address, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(),
      /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  set_layout(result, tensor);
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

// A tensor of the current device with the values of one of the CPU.
at::Tensor copied(const at::Tensor& theirs) {
  check(theirs.scalar_type());
  at::Tensor fresh = at::detail::empty_strided_generic(
      theirs.sizes(), theirs.strides(), &memory(), KEYS, theirs.scalar_type());
  shown(fresh).copy_(theirs);
  return fresh;
}

at::SparseTensorImpl* sparse(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::Tensor sparse_of(
    c10::DispatchKeySet keys, const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values) {
  auto result = at::detail::make_tensor<at::SparseTensorImpl>(keys, like.dtype());
  sparse(result)->resize_(sparse(like)->sparse_dim(), sparse(like)->dense_dim(), like.sizes());
  sparse(result)->set_indices_and_values_unsafe(indices, values);
  sparse(result)->set_coalesced(sparse(like)->coalesced());
  return result;
}

struct BelowEverything { // no graph, no casts: a kernel is called
  at::AutoDispatchBelowADInplaceOrView no_graph;
  c10::impl::ExcludeDispatchKeyGuard no_casts{c10::autocast_dispatch_keyset};
};

// The arguments of one operator, as the CPU's kernel sees them, and its results as the caller does.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : schema_(op.schema()) {
    widens_ = schema_.name().rfind("aten::_fused_", 0) == 0;
    for (const auto& argument : schema_.arguments())
      takes_lists_ |= argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
    const auto first = stack->size() - schema_.arguments().size();
    for (size_t i = 0; i < schema_.arguments().size(); ++i)
      replace((*stack)[first + i], [&](const at::Tensor& t) { return take(t); });
    OnDevice on(device_);
    device_ = current;
    bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      auto& value = (*stack)[first + i];
      has_size_ |= schema_.arguments()[i].name() == "output_size" && !value.isNone();
      if (value.isDevice()) {
        value = c10::Device(c10::kCPU);
      } else if (value.isGenerator()) {
        TORCH_CHECK(
            value.toGenerator().device() == c10::Device(SIM, device_),
            schema_.name(), ": a generator of ", value.toGenerator().device());
        value = inner(value.toGenerator());
        draws = false;
      } else if (draws && schema_.arguments()[i].name() == "generator") {
        value = inner(default_generator(device_));
        draws = false;
      }
    }
    if (draws)
      numbers_.emplace(device_);
    const bool unknown_shape =
        (op.hasTag(at::Tag::dynamic_output_shape) && !has_indices_ && !has_size_) ||
        schema_.name() == "aten::_coalesce";
    if (op.hasTag(at::Tag::data_dependent_output) || unknown_shape || has_mask_)
      wait(counters.reads, schema_.name());
    const auto& results = schema_.returns();
    const auto* alias = results.empty() ? nullptr : results[0].alias_info();
    if (!alias || alias->isWrite())
      launch(schema_.name());
  }

  void results(torch::jit::Stack* stack) {
    for (auto& [own, theirs] : tensors_) {
      if (theirs.scalar_type() != own.scalar_type()) {
        shown(own).copy_(theirs);
        continue;
      }
      if (theirs.storage().data() != memory().shown(own.storage().data())) {
        const auto bytes = theirs.storage().nbytes(); // the kernel made it larger
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(own.storage(), bytes);
        std::memcpy(memory().shown(own.storage().data()), theirs.storage().data(), bytes);
      }
      if (own.sizes() != theirs.sizes() || own.strides() != theirs.strides() ||
          own.storage_offset() != theirs.storage_offset())
        set_layout(own, theirs);
    }
    const auto count = schema_.returns().size();
    for (size_t i = stack->size() - count; i < stack->size(); ++i)
      replace((*stack)[i], [&](const at::Tensor& t) { return give(t); });
  }

 private:
  template <typename F>
  void replace(c10::IValue& value, F by) {
    if (value.isTensor()) {
      value = by(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(by(tensor));
      }
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      has_indices_ = true;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        const bool there = tensor && tensor->defined();
        has_mask_ |= there && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
        list.push_back(there ? std::optional<at::Tensor>(by(*tensor)) : std::nullopt);
      }
      value = std::move(list);
    }
  }

  at::Tensor take(const at::Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    if (tensor.device().type() != SIM) { // a number of the host goes along with a launch
      TORCH_CHECK(tensor.device().is_cpu() && tensor.dim() == 0 && !takes_lists_,
          schema_.name(), ": a tensor on ", tensor.device(), " among those of the device");
      return tensor;
    }
    if (tensor.layout() == c10::kSparse) {
      const auto indices = take(sparse(tensor)->indices()), values = take(sparse(tensor)->values());
      return sparse_of(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), tensor, indices, values);
    }
    TORCH_CHECK(tensor.layout() == c10::kStrided, schema_.name(), ": ", tensor.layout());
    TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(),
        schema_.name(), ": tensors on sim:", int(device_), " and ", tensor.device());
    device_ = tensor.device().index();
    for (auto& [own, theirs] : tensors_)
      if (own.is_same(tensor))
        return theirs;
    auto theirs = shown(tensor);
    if (widens_ && tensor.itemsize() == 2)
      theirs = theirs.to(at::kFloat);
    return tensors_.emplace_back(tensor, theirs).second;
  }

  at::Tensor give(const at::Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    for (auto& [own, theirs] : tensors_)
      if (theirs.is_same(tensor))
        return own;
    OnDevice on(device_);
    if (tensor.layout() == c10::kSparse) {
      const auto indices = give(sparse(tensor)->indices()), values = give(sparse(tensor)->values());
      return sparse_of(SPARSE, tensor, indices, values);
    }
    for (auto& [own, theirs] : tensors_)
      if (theirs.storage().data() == tensor.storage().data()) { // a view
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(own.storage()), KEYS, tensor.dtype());
        set_layout(view, tensor);
        view._set_conj(tensor.is_conj());
        view._set_neg(tensor.is_neg());
        return view;
      }
    return copied(tensor);
  }

  const c10::FunctionSchema& schema_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_; // the device's, as the kernel sees it
  c10::DeviceIndex device_ = -1;
  bool takes_lists_ = false, has_indices_ = false, has_mask_ = false, has_size_ = false;
  bool widens_; // as CUDA's: the CPU's in half precision leave vector lanes as they were
  std::optional<LentNumbers> numbers_;
};

void run_on(c10::DispatchKey key, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  BelowEverything below;
  Call call(op, stack);
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  call.results(stack);
}

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_on(c10::DispatchKey::CPU, op, stack);
}

void sparse_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_on(c10::DispatchKey::SparseCPU, op, stack);
}

// torch calls a device's convolution by a name of its own.
void convolution(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const auto real = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  kernel(real, KEYS, stack);
}

void convolution_backward(
    const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const auto real =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto first = stack->end() - op.schema().arguments().size();
  const auto weight = first[2].toTensor(), grad = first[0].toTensor();
  const bool transposed = first[6].toBool();
  const int64_t features =
      transposed ? weight.size(1) * first[8].toInt() : weight.size(0);
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{features}));
  kernel(real, KEYS, stack);
}

// Cells of LSTM and GRU, which torch wants of each device but the CPU.

using Maybe = std::optional<at::Tensor>;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

at::Tensor shown_or(const Maybe& tensor, const at::Tensor& otherwise) {
  return tensor && tensor->defined() ? shown(*tensor) : otherwise;
}

struct Cell : BelowEverything, OnDevice {
  Cell(const char* name, const at::Tensor& like) : OnDevice(like.device().index()) {
    launch(name);
  }
};

Three lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& c, const Maybe& b, const Maybe& d) {
  Cell cell("aten::_thnn_fused_lstm_cell", input);
  const auto zero = at::zeros({}, shown(input).options());
  const auto sums = shown(input) + shown_or(b, zero) + shown(hidden) + shown_or(d, zero);
  const auto parts = sums.chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), out = parts[3].sigmoid();
  const auto fresh = parts[2].tanh(), after = forget * shown(c) + in * fresh;
  return {copied(out * after.tanh()), copied(after), copied(at::cat({in, forget, fresh, out}, 1))};
}

Three lstm_cell_backward(
    const Maybe& by_h, const Maybe& by_c, const at::Tensor& c, const at::Tensor& after,
    const at::Tensor& gates, bool has_bias) {
  Cell cell("aten::_thnn_fused_lstm_cell_backward_impl", c);
  const auto zeros = at::zeros_like(shown(c)), h = shown_or(by_h, zeros), bent = shown(after).tanh();
  const auto parts = shown(gates).chunk(4, 1);
  const auto &in = parts[0], &forget = parts[1], &fresh = parts[2], &out = parts[3];
  const auto all = shown_or(by_c, zeros) + h * out * (1 - bent * bent);
  const auto by_gates = at::cat(
      {all * fresh * in * (1 - in), all * shown(c) * forget * (1 - forget),
       all * in * (1 - fresh * fresh), h * bent * out * (1 - out)}, 1);
  const auto by_bias = has_bias ? copied(by_gates.sum(0)) : at::Tensor();
  return {copied(by_gates), copied(all * forget), by_bias};
}

Two gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& h, const Maybe& b, const Maybe& d) {
  Cell cell("aten::_thnn_fused_gru_cell", input);
  const auto zero = at::zeros({}, shown(input).options());
  const auto ours = (shown(input) + shown_or(b, zero)).chunk(3, 1);
  const auto theirs = (shown(hidden) + shown_or(d, zero)).chunk(3, 1);
  const auto reset = (ours[0] + theirs[0]).sigmoid(), keep = (ours[1] + theirs[1]).sigmoid();
  const auto fresh = (ours[2] + reset * theirs[2]).tanh();
  const auto kept = at::cat({reset, keep, fresh, shown(h), theirs[2]}, 1);
  return {copied(fresh + keep * (shown(h) - fresh)), copied(kept)};
}

Five gru_cell_backward(const at::Tensor& by_h, const at::Tensor& kept, bool has_bias) {
  Cell cell("aten::_thnn_fused_gru_cell_backward", by_h);
  const auto parts = shown(kept).chunk(5, 1);
  const auto &reset = parts[0], &keep = parts[1], &fresh = parts[2], &h = parts[3];
  const auto by_keep = shown(by_h) * (h - fresh) * keep * (1 - keep);
  const auto by_fresh = shown(by_h) * (1 - keep) * (1 - fresh * fresh);
  const auto by_reset = by_fresh * parts[4] * reset * (1 - reset);
  const auto ours = at::cat({by_reset, by_keep, by_fresh}, 1);
  const auto theirs = at::cat({by_reset, by_keep, by_fresh * reset}, 1);
  const auto sum = [&](const at::Tensor& t) { return has_bias ? copied(t.sum(0)) : at::Tensor(); };
  return {copied(ours), copied(theirs), copied(shown(by_h) * keep), sum(ours), sum(theirs)};
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  BelowEverything below;
  const bool from_device = self.device().type() == SIM, to_device = to.device().type() == SIM;
  if (!to_device)
    wait(counters.to_host, "a copy to the host");
  else if (!from_device) {
    ++counters.to_device;
    if (!non_blocking)
      wait(counters.waits, "a copy to the device without non_blocking");
  } else if (self.device() != to.device())
    ++counters.between;
  else
    launch("aten::copy_");
  (to_device ? shown(to) : to).copy_(from_device ? shown(self) : self);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor& set_part(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "set_: memory of ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return set_part(self, std::move(source), 0, {size}, {});
}

at::Tensor& set_like(at::Tensor& self, const at::Tensor& source) {
  return set_part(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  OnDevice on(self.device().index());
  c10::Storage fresh(c10::Storage::use_byte_size_t(), 0, memory().allocate(0), &memory(), true);
  return set_part(self, std::move(fresh), 0, {0}, {});
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef by) {
  return self.as_strided_symint(size, by);
}

bool begins(const c10::OperatorHandle& op, const char* with) {
  return op.operator_name().name.rfind(with, 0) == 0;
}

// Registers one kernel for all operators of this kind that have none.
template <auto* boxed, typename F>
void register_all(torch::Library& m, c10::DispatchKey key, F of_this_kind) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op && begins(*op, "aten::") && of_this_kind(*op) && !op->hasKernelForDispatchKey(key)) {
      const auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
      m.impl((name.name + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<boxed>());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Tensor", TORCH_FN(set_like));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // What is one kernel of the CPU is one launch here. Without this, torch would take many of them
  // apart into others, lists of tensors into single ones.
  register_all<&kernel>(m, c10::DispatchKey::PrivateUse1, [](const auto& op) {
    return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || begins(op, "aten::_foreach_");
  });
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  register_all<&sparse_kernel>(m, c10::DispatchKey::SparsePrivateUse1, [](const auto& op) {
    return op.hasKernelForDispatchKey(c10::DispatchKey::SparseCPU);
  });
}

// torch resolves a pending conjugation or negation by a copy, so the copy must take it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

// ---- for Python ---------------------------------------------------------------------------------

std::vector<int64_t> counts() {
  return {counters.launches, counters.reads, counters.to_host, counters.to_device,
          counters.between, counters.waits, counters.events, counters.blocks};
}

std::vector<std::string> launched(bool keep) {
  std::lock_guard<std::mutex> lock(names_lock);
  names_are_kept = keep;
  return std::exchange(names, {});
}

bool refuse_waiting(bool refuse) {
  return waiting_is_an_error.exchange(refuse);
}

bool refuse_float64(bool refuse) {
  return float64_is_an_error.exchange(refuse);
}

int64_t exchange_device(int64_t index) {
  return Guard().exchangeDevice({SIM, c10::DeviceIndex(index)}).index();
}

at::Tensor get_rng_state(int64_t index) {
  return default_generator(index).get_state();
}

void set_rng_state(const at::Tensor& state, int64_t index) {
  at::Generator(default_generator(index)).set_state(state);
}

void manual_seed(int64_t seed, int64_t index) {
  at::Generator(default_generator(index)).set_current_seed(seed);
}

TORCH_LIBRARY(sim, m) {
  m.def("counts() -> int[]", &counts);
  m.def("launched(bool keep) -> str[]", &launched);
  m.def("refuse_waiting(bool refuse) -> bool", &refuse_waiting);
  m.def("refuse_float64(bool refuse) -> bool", &refuse_float64);
  m.def("exchange_device(int index) -> int", &exchange_device);
  m.def("get_rng_state(int index) -> Tensor", &get_rng_state);
  m.def("set_rng_state(Tensor state, int index) -> ()", &set_rng_state);
  m.def("manual_seed(int seed, int index) -> ()", &manual_seed);
}

} // namespace

// ---- autocast: the lists of CUDA ----------------------------------------------------------------

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

static at::Tensor refused(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe under autocast");
}

#define IN_HALF(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TO_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define NORM(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_HALF)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TO_FLOAT32)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(NORM)
  AT_FORALL_PROMOTE(WIDEST)
  m.impl("binary_cross_entropy", TORCH_FN(refused));
}

} // namespace at::autocast
