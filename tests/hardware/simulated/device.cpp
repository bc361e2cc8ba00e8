// A device of its own in the host's memory, with streams, pinned memory and generators: what an accelerator is to torch.
//
// Operations are the host's, on copies of their operands. A copy from pinned memory on a stream of its own, and any
// copy to pinned memory, is not done until somebody waits for it, so that whoever forgets to computes with NaN. Where
// the host waits for the device, `watch` is told.

#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using namespace device;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {0, 0};
std::atomic<int64_t> next_stream{1};
std::atomic<int64_t> num_from_pinned{0}, num_from_pageable{0}, num_deferred{0}, num_used_elsewhere{0}, num_to_pinned{0};
std::atomic<int64_t> bytes_in_use{0}, most_bytes{0}, capacity{int64_t{1} << 62};
thread_local int depth_of_the_device = 0;
py::object* watcher = nullptr;

// Tell that the host waits for the device.
void note_synchronisation(const std::string& what) {
    if (depth_of_the_device || watcher == nullptr) return;
    const py::gil_scoped_acquire held;
    (*watcher)(what);
}

// Whether it is played as one that executes in the order of the calls, such as a TPU: its streams are all one, and
// memory of the host cannot be pinned.
std::atomic<bool> in_order{false};

struct Pinned final : c10::Allocator {
    std::map<const char*, size_t> blocks;
    std::mutex lock;

    c10::DataPtr allocate(size_t size) override {
        TORCH_CHECK(!in_order, "memory of the host cannot be pinned for this device");
        void* data = std::malloc(size ? size : 1);
        std::lock_guard<std::mutex> held(lock);
        blocks[static_cast<char*>(data)] = size ? size : 1;
        return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
    }
    static void release(void* data);
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
    bool has(const void* data) {
        std::lock_guard<std::mutex> held(lock);
        auto after = blocks.upper_bound(static_cast<const char*>(data));
        if (after == blocks.begin()) return false;
        --after;
        return static_cast<const char*>(data) < after->first + after->second;
    }
};
Pinned pinned;
void Pinned::release(void* data) {
    {
        std::lock_guard<std::mutex> held(pinned.lock);
        pinned.blocks.erase(static_cast<char*>(data));
    }
    std::free(data);
}

struct Memory final : c10::DeviceAllocator {
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t = {0, 0}) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        c10::CachingDeviceAllocator::DeviceStats stats;
        for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes}) {
            (*each)[0].current = bytes_in_use;
            (*each)[0].peak = most_bytes;
        }
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override { most_bytes = bytes_in_use.load(); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {capacity - bytes_in_use, capacity}; }
    c10::DataPtr allocate(size_t size) override {
        auto in_use = bytes_in_use += size;
        if (in_use > capacity) {
            bytes_in_use -= size;
            TORCH_CHECK_WITH(OutOfMemoryError, false, "the device has no room for ", size, " bytes");
        }
        auto most = most_bytes.load();
        while (in_use > most && !most_bytes.compare_exchange_weak(most, in_use)) {}
        auto* block = static_cast<size_t*>(std::malloc(size + 64));
        block[0] = size;
        char* data = reinterpret_cast<char*>(block) + 64;
        std::memset(data, 0xFF, size);
        return {data, block, &release, c10::Device(kType, current_device)};
    }
    static void release(void* block) {
        bytes_in_use -= static_cast<size_t*>(block)[0];
        std::free(block);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// What a stream has still to do, and how much it has done.
struct Work {
    std::deque<std::function<void()>> waiting;
    int64_t num_done = 0;
};
std::map<c10::StreamId, Work> streams;  // those of both devices have different numbers
std::recursive_mutex streams_lock;

// Nobody waits for the lock with Python's: whoever has this one may need that to let a tensor go.
struct Held {
    std::unique_lock<std::recursive_mutex> lock;

    Held() {
        if (!PyGILState_Check()) {
            lock = std::unique_lock(streams_lock);
            return;
        }
        const pybind11::gil_scoped_release released;
        lock = std::unique_lock(streams_lock);
    }
};

}  // namespace

void device::run(c10::StreamId id, int64_t up_to) {
    const Held held;
    auto& work = streams[id];
    while (!work.waiting.empty() && work.num_done < up_to) {
        auto next = std::move(work.waiting.front());
        work.waiting.pop_front();
        ++work.num_done;
        next();
    }
}

void device::run_current() {
    for (auto id : current_streams) run(id, INT64_MAX);
}

c10::StreamId device::new_stream() { return next_stream++; }

int64_t device::leave(c10::StreamId id, std::function<void()> next) {
    const Held held;
    auto& work = streams[id];
    work.waiting.push_back(std::move(next));
    return work.num_done + static_cast<int64_t>(work.waiting.size());
}

void device::spoil(const at::Tensor& tensor) {
    if (tensor.is_non_overlapping_and_dense()) std::memset(tensor.data_ptr(), 0xFF, tensor.nbytes());
}

device::OfTheDevice::OfTheDevice() { ++depth_of_the_device; }
device::OfTheDevice::~OfTheDevice() { --depth_of_the_device; }

at::Tensor device::on_host(const at::Tensor& tensor) {
    if (tensor.device().is_cpu()) return tensor;
    return at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::CPU));
}

namespace {

struct Event {
    c10::StreamId stream;
    int64_t position;
    std::chrono::steady_clock::time_point time;  // of the record: what is left for later takes no time of its own
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device device) const override {
        auto old = getDevice();
        current_device = device.index();
        return old;
    }
    c10::Device getDevice() const override { return {kType, current_device}; }
    void setDevice(c10::Device device) const override { current_device = device.index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
    c10::Stream stream(c10::StreamId id, c10::DeviceIndex index) const {
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
    }
    static c10::DeviceIndex known(c10::Device device) { return device.has_index() ? device.index() : current_device; }
    c10::Stream getStream(c10::Device device) const override { return stream(current_streams[known(device)], known(device)); }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(0, known(device)); }
    c10::Stream getNewStream(c10::Device device, int = 0) const override {
        return stream(in_order ? 0 : new_stream(), known(device));
    }
    c10::Stream exchangeStream(c10::Stream given) const override {
        auto old = getStream(given.device());
        current_streams[given.device_index()] = given.id();
        return old;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        const Held held;
        auto& work = streams[stream.id()];
        delete static_cast<Event*>(*event);
        *event = new Event{stream.id(), work.num_done + static_cast<int64_t>(work.waiting.size()), std::chrono::steady_clock::now()};
    }
    double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
        TORCH_CHECK(queryEvent(start) && queryEvent(end), "the device has not come to both events yet");
        auto passed = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
        return std::chrono::duration<double, std::milli>(passed).count();
    }
    void block(void* event, const c10::Stream&) const override { finish(event); }
    static void finish(void* event) {
        if (auto* recorded = static_cast<Event*>(event)) run(recorded->stream, recorded->position);
    }
    bool queryEvent(void* event) const override {
        const Held held;
        auto* recorded = static_cast<Event*>(event);
        return recorded == nullptr || streams[recorded->stream].num_done >= recorded->position;
    }
    void synchronizeEvent(void* event) const override {
        note_synchronisation("an event");
        finish(event);
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    bool queryStream(const c10::Stream& stream) const override {
        TORCH_CHECK(!in_order, "a stream of this device does not tell whether it is done");
        const Held held;
        return streams[stream.id()].waiting.empty();
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        note_synchronisation("a stream");
        run(stream.id(), INT64_MAX);
    }
    void synchronizeDevice(const c10::DeviceIndex) const override {
        note_synchronisation("the device");
        const Held held;
        for (auto& [id, work] : streams) run(id, INT64_MAX);
    }
    void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Numbers of the device's own: those of a host's generator that nothing else draws from.
struct Numbers final : c10::GeneratorImpl {
    at::Generator host = at::detail::createCPUGenerator();

    explicit Numbers(c10::DeviceIndex index)
        : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
    void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
    void set_offset(uint64_t) override {}
    uint64_t get_offset() const override { return 0; }
    uint64_t current_seed() const override { return host.current_seed(); }
    uint64_t seed() override { return host.seed(); }
    void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
    GeneratorImpl* clone_impl() const override {
        auto* copy = new Numbers(device().index());
        copy->host = host.clone();
        return copy;
    }
};

at::Generator& numbers_of(c10::DeviceIndex index) {
    static std::array<at::Generator, kDevices> all = {at::make_generator<Numbers>(0), at::make_generator<Numbers>(1)};
    return all.at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
    bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
    at::Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
        auto data = memory.allocate(size);
        if (size) memory.copy_data(data.get(), storage.data(), std::min(size, storage.nbytes()));
        storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
        storage.unsafeGetStorageImpl()->set_nbytes(size);
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return numbers_of(index); }
    at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
        return at::make_generator<Numbers>(index < 0 ? current_device : index);
    }
};

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(device.value_or(at::Device(kType)));
    return at::detail::empty_generic(
        size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(device.value_or(at::Device(kType)));
    return at::detail::empty_strided_generic(
        size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    const bool up = source.device().is_cpu() && source.numel();
    const bool direct = up && pinned.has(source.data_ptr());
    if (up) ++(direct ? num_from_pinned : num_from_pageable);
    const auto stream = up ? current_streams[target.device().index()] : 0;
    if (direct && non_blocking && stream != 0) {
        ++num_deferred;
        leave(stream, [source, target] { on_host(target).copy_(source); });
        return target;
    }
    if (target.device().is_cpu() && target.numel() && non_blocking && pinned.has(target.data_ptr())) {
        ++num_to_pinned;
        spoil(target);
        leave(current_streams[source.device().index()], [source, target] { target.copy_(on_host(source)); });
        return target;
    }
    if (target.device().is_cpu() || (up && !non_blocking)) {
        note_synchronisation(up ? "a copy from the host" : "a copy to the host");
    }
    run_current();
    on_host(target).copy_(on_host(source));
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

// A parameter of the host's becomes one of the device in place, as for the devices that torch itself knows; or not, as
// for others.
std::atomic<bool> moves_in_place{true};
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
    const bool same = self.device().type() == from.device().type();
    return (same || moves_in_place) && self.layout() == at::kStrided && from.layout() == at::kStrided;
}

void record_stream(at::Tensor&, c10::Stream) {
    TORCH_CHECK(!in_order, "memory of this device belongs to no stream");
    ++num_used_elsewhere;
}

// Operations whose result an accelerator's host must read: a number, or a size.
bool is_read(const c10::OperatorHandle& operation, const torch::jit::Stack& stack) {
    static const std::set<std::string> reads = {
        "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
        "aten::unique_consecutive", "aten::unique_dim", "aten::repeat_interleave"};
    const auto& name = operation.schema().name();
    if (reads.count(name)) return true;
    if (name.rfind("aten::index", 0) != 0 && name.rfind("aten::_index_put", 0) != 0) return false;
    for (const auto& value : torch::jit::last(stack, operation.schema().arguments().size())) {
        if (!value.isList()) continue;
        for (const auto& each : value.toListRef()) {
            if (each.isTensor() && each.toTensor().defined() && each.toTensor().scalar_type() == at::kBool) return true;
        }
    }
    return false;
}

// Draw the device's numbers in an operation of the host: of the generator it was given, else of the device's own.
struct Drawn {
    at::Generator of;
    at::Generator host = at::detail::getDefaultCPUGenerator();
    at::Tensor before = host.get_state();

    Drawn(const c10::OperatorHandle& operation, torch::jit::Stack* stack) : of(numbers_of(-1)) {
        for (auto& value : torch::jit::last(*stack, operation.schema().arguments().size())) {
            if (!value.isGenerator()) continue;
            of = value.toGenerator();
            const_cast<c10::IValue&>(value) = c10::IValue();
        }
        host.set_state(of.get_state());
    }
    ~Drawn() {
        of.set_state(host.get_state());
        host.set_state(before);
    }
};

void by_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    if (is_read(operation, *stack)) note_synchronisation(operation.schema().name());
    const OfTheDevice within;
    run_current();
    std::optional<Drawn> drawn;
    if (operation.hasTag(at::Tag::nondeterministic_seeded)) drawn.emplace(operation, stack);
    at::native::cpu_fallback(operation, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
    library.impl("record_stream", &record_stream);
    library.impl("resize_", &at::native::resize_);
    library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
    library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    library.impl("as_strided", &at::native::as_strided_tensorimpl);
    library.impl("_reshape_alias", &at::native::_reshape_alias);
    library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(&at::native::view));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    module.def("generator", &numbers_of);
    module.def("move_in_place", [](bool whether) { moves_in_place = whether; });
    module.def("execute_in_order", [] { in_order = true; });
    module.def("collectives", &collectives);
    module.def("watch", [](const py::object& told) {
        auto* before = watcher;
        watcher = told.is_none() ? nullptr : new py::object(told);
        delete before;
    });
    module.def("counts", [] {
        return std::map<std::string, int64_t>{
            {"from_pinned", num_from_pinned}, {"from_pageable", num_from_pageable},
            {"deferred", num_deferred},       {"used_elsewhere", num_used_elsewhere},
            {"to_pinned", num_to_pinned},
            {"in_use", bytes_in_use},         {"most", most_bytes}};
    });
    module.def("finish", [] {
        const Held held;
        for (auto& [id, work] : streams) run(id, INT64_MAX);
    });
    module.def("reset_most", [] { most_bytes = bytes_in_use.load(); });
    module.def("set_capacity", [](int64_t bytes) { capacity = bytes; });
}
