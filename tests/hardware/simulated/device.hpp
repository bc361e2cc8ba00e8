// What the parts of the device share; device.cpp says what the device is.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <functional>
#include <string>

namespace device {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

// A tensor on the host over the same memory.
at::Tensor on_host(const at::Tensor& tensor);

// Fill a tensor with NaN: what it will hold is not there yet.
void spoil(const at::Tensor& tensor);

c10::StreamId new_stream();

// Leave work to a stream. It is done when somebody waits for the stream, and in the order in which it was left.
// Returns its position on the stream.
int64_t leave(c10::StreamId stream, std::function<void()> work);

// Do the work of a stream up to a position.
void run(c10::StreamId stream, int64_t up_to);

// Do what was left to this thread's current streams.
void run_current();

// Inside, copies to the host are the device's own and no synchronisations of whoever uses it.
struct OfTheDevice {
    OfTheDevice();
    ~OfTheDevice();
};

c10::intrusive_ptr<c10d::Backend> collectives(const c10::intrusive_ptr<c10d::Backend>& host);

}  // namespace device
