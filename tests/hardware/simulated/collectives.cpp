// Collectives of the device's tensors: a host's backend, gloo, does them on copies, and what it gives is on the device
// once somebody has waited for it. Until then its tensors hold NaN.

#include "device.hpp"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

using namespace device;
using Tensors = std::vector<at::Tensor>;
using c10d::OpType;
using c10d::ReduceOp;
using Handle = c10::intrusive_ptr<c10d::Work>;

struct Done final : c10d::Work {
    Tensors outputs;
    c10::StreamId stream;
    int64_t position;
    c10::intrusive_ptr<c10::ivalue::Future> future;

    Done(int rank, OpType kind, Tensors given, c10::StreamId on, int64_t at)
        : Work(rank, kind), outputs(std::move(given)), stream(on), position(at) {
        completed_ = true;
        std::vector<c10::Device> devices;
        std::vector<c10::Stream> streams;
        if (!outputs.empty()) {
            devices.push_back(outputs[0].device());
            streams.emplace_back(c10::Stream::UNSAFE, outputs[0].device(), stream);
        }
        future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
        const c10::MultiStreamGuard within(streams);
        future->markCompleted(c10::IValue(outputs));
    }
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    Tensors result() override { return outputs; }
    void synchronize() override { run(stream, position); }
    bool wait(std::chrono::milliseconds) override {
        synchronize();
        return true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

Tensors copies_of(const Tensors& tensors) {
    Tensors copies;
    for (const auto& tensor : tensors) copies.push_back(on_host(tensor).clone(at::MemoryFormat::Contiguous));
    return copies;
}

// What gloo has no operation for is a sum, of parts that are scaled before or after.
struct Reduction {
    double before = 1, after = 1;
    ReduceOp op;

    Reduction(const ReduceOp& asked, int size) : op(asked) {
        if (asked.op_ == ReduceOp::AVG) after = 1.0 / size;
        if (asked.op_ == ReduceOp::PREMUL_SUM) {
            before = static_cast<c10d::NCCLPreMulSumSupplement*>(asked.supplement_.get())->double_factor;
        }
        if (asked.op_ == ReduceOp::AVG || asked.op_ == ReduceOp::PREMUL_SUM) op = ReduceOp(ReduceOp::SUM);
    }
    static void scale(Tensors& tensors, double factor) {
        if (factor != 1) {
            for (auto& tensor : tensors) tensor.mul_(factor);
        }
    }
};

class Collectives final : public c10d::Backend {
   public:
    explicit Collectives(c10::intrusive_ptr<Backend> host)
        : Backend(host->getRank(), host->getSize()), host_(std::move(host)), stream_(new_stream()) {}

    const std::string getBackendName() const override { return "hccl"; }

    Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        const Reduction reduction(options.reduceOp, getSize());
        auto own = options;
        own.reduceOp = reduction.op;
        return carry(OpType::ALLREDUCE, tensors, tensors, [&](Tensors& in, Tensors& out) {
            Reduction::scale(in, reduction.before);
            host_->allreduce(in, own)->wait();
            Reduction::scale(in, reduction.after);
            out = in;
        });
    }
    Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
        Handle last;
        for (auto& tensor : tensors) {
            Tensors one = {tensor};
            last = allreduce(one, options);
        }
        return last;
    }
    Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        return carry(OpType::BROADCAST, tensors, tensors, [&](Tensors& in, Tensors& out) {
            host_->broadcast(in, options)->wait();
            out = in;
        });
    }
    Handle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
        return carry(OpType::_ALLGATHER_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
            host_->_allgather_base(out[0], in[0], options)->wait();
        });
    }
    Handle allgather_into_tensor_coalesced(
        Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        Handle last;
        for (size_t index = 0; index < inputs.size(); ++index) {
            last = _allgather_base(outputs[index], inputs[index], options);
        }
        return last;
    }
    Handle allgather(
        std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        return carry(OpType::ALLGATHER, inputs, outputs[0], [&](Tensors& in, Tensors& out) {
            std::vector<Tensors> lists = {out};
            host_->allgather(lists, in, options)->wait();
        });
    }
    Handle _reduce_scatter_base(
        at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
        const Reduction reduction(options.reduceOp, getSize());
        auto own = options;
        own.reduceOp = reduction.op;
        return carry(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
            Reduction::scale(in, reduction.before);
            host_->_reduce_scatter_base(out[0], in[0], own)->wait();
            Reduction::scale(out, reduction.after);
        });
    }
    Handle alltoall_base(
        at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received, std::vector<int64_t>& sent,
        const c10d::AllToAllOptions& options) override {
        return carry(OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
            host_->alltoall_base(out[0], in[0], received, sent, options)->wait();
        });
    }
    Handle scatter(
        Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
        const Tensors given = inputs.empty() ? Tensors() : inputs[0];
        return carry(OpType::SCATTER, given, outputs, [&](Tensors& in, Tensors& out) {
            std::vector<Tensors> lists;
            if (!in.empty()) lists.push_back(in);
            host_->scatter(out, lists, options)->wait();
        });
    }
    Handle barrier(const c10d::BarrierOptions& options) override {
        return carry(OpType::BARRIER, {}, {}, [&](Tensors&, Tensors&) { host_->barrier(options)->wait(); });
    }
    Handle send(Tensors& tensors, int rank, int tag) override {
        return carry(OpType::SEND, tensors, {}, [&](Tensors& in, Tensors&) { host_->send(in, rank, tag)->wait(); });
    }
    Handle recv(Tensors& tensors, int rank, int tag) override {
        return carry(OpType::RECV, {}, tensors, [&](Tensors&, Tensors& out) { host_->recv(out, rank, tag)->wait(); });
    }

   private:
    // Do a collective on copies, and leave what it gave to the stream of this backend.
    template <typename Collective>
    Handle carry(OpType kind, const Tensors& inputs, const Tensors& outputs, const Collective& collective) {
        const OfTheDevice within;
        run_current();
        auto in = copies_of(inputs), out = copies_of(outputs);
        collective(in, out);
        for (const auto& output : outputs) spoil(output);
        const auto position = leave(stream_, [outputs, out] {
            for (size_t index = 0; index < outputs.size(); ++index) on_host(outputs[index]).copy_(out[index]);
        });
        return c10::make_intrusive<Done>(getRank(), kind, outputs, stream_, position);
    }

    c10::intrusive_ptr<Backend> host_;
    c10::StreamId stream_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> device::collectives(const c10::intrusive_ptr<c10d::Backend>& host) {
    return c10::make_intrusive<Collectives>(host);
}
