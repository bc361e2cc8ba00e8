// A device of its own in the host's memory, with streams and pinned memory: what an accelerator is to torch.
//
// Operations are the host's, on copies of their operands. A copy from pinned memory on a stream of its own is not done
// until somebody waits for it, so that whoever forgets to computes with what new memory holds: NaN.

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
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {0, 0};
std::atomic<int64_t> next_stream{1};
std::atomic<int64_t> num_from_pinned{0}, num_from_pageable{0}, num_deferred{0}, num_used_elsewhere{0};
std::atomic<int64_t> bytes_in_use{0}, most_bytes{0}, capacity{INT64_MAX};

struct Pinned final : c10::Allocator {
    std::map<const char*, size_t> blocks;
    std::mutex lock;

    c10::DataPtr allocate(size_t size) override {
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

struct Memory final : c10::Allocator {
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

void run(c10::StreamId id, int64_t up_to) {
    const Held held;
    auto& work = streams[id];
    while (!work.waiting.empty() && work.num_done < up_to) {
        auto next = std::move(work.waiting.front());
        work.waiting.pop_front();
        ++work.num_done;
        next();
    }
}

void run_current() {
    for (auto id : current_streams) run(id, INT64_MAX);
}

struct Event {
    c10::StreamId stream;
    int64_t position;
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
    c10::Stream getNewStream(c10::Device device, int = 0) const override { return stream(next_stream++, known(device)); }
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
        *event = new Event{stream.id(), work.num_done + static_cast<int64_t>(work.waiting.size())};
    }
    void block(void* event, const c10::Stream&) const override { synchronizeEvent(event); }
    bool queryEvent(void* event) const override {
        const Held held;
        auto* recorded = static_cast<Event*>(event);
        return recorded == nullptr || streams[recorded->stream].num_done >= recorded->position;
    }
    void synchronizeEvent(void* event) const override {
        if (auto* recorded = static_cast<Event*>(event)) run(recorded->stream, recorded->position);
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    bool queryStream(const c10::Stream& stream) const override {
        const Held held;
        return streams[stream.id()].waiting.empty();
    }
    void synchronizeStream(const c10::Stream& stream) const override { run(stream.id(), INT64_MAX); }
    void synchronizeDevice(const c10::DeviceIndex) const override {
        const Held held;
        for (auto& [id, work] : streams) run(id, INT64_MAX);
    }
    void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

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
};

at::Tensor on_host(const at::Tensor& tensor) {
    if (tensor.device().is_cpu()) return tensor;
    return at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::CPU));
}

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
        const Held held;
        streams[stream].waiting.push_back([source, target] { on_host(target).copy_(source); });
        return target;
    }
    run_current();
    on_host(target).copy_(on_host(source));
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

void record_stream(at::Tensor&, c10::Stream) { ++num_used_elsewhere; }

void by_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    run_current();
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
    library.impl("record_stream", &record_stream);
    library.impl("resize_", &at::native::resize_);
    library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    library.impl("as_strided", &at::native::as_strided_tensorimpl);
    library.impl("_reshape_alias", &at::native::_reshape_alias);
    library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(&at::native::view));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    module.def("counts", [] {
        return std::map<std::string, int64_t>{
            {"from_pinned", num_from_pinned}, {"from_pageable", num_from_pageable},
            {"deferred", num_deferred},       {"used_elsewhere", num_used_elsewhere},
            {"in_use", bytes_in_use},         {"most", most_bytes}};
    });
    module.def("finish", [] {
        const Held held;
        for (auto& [id, work] : streams) run(id, INT64_MAX);
    });
    module.def("reset_most", [] { most_bytes = bytes_in_use.load(); });
    module.def("set_capacity", [](int64_t bytes) { capacity = bytes; });
}
