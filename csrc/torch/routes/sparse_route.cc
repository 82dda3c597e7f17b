#include "torch/routes/sparse_route.h"

#include <utility>
#include <vector>

#include "core/schemes/sparse_exchange.h"
#include "torch/catching.h"
#include "torch/dtypes.h"
#include "torch/membership.h"
#include "torch/routes/grad_place.h"
#include "torch/status_error.h"

namespace poseidon {

// What is in flight of one step, with the memory that receives it.
class SparseRoute::Gathered final : public SparseExchange::Receiver {
 public:
  Buffer AllocateIndices(const std::vector<int64_t>& shape) override {
    indices = at::empty(shape, at::kLong);
    return ToBuffer(indices);
  }
  Buffer AllocateValues(const std::vector<int64_t>& shape) override {
    values = at::empty(shape, my_values.options());
    return ToBuffer(values);
  }

  at::Tensor my_indices, my_values;
  at::Tensor indices, values;  // of all ranks
};

SparseRoute::SparseRoute(RouteContext& context, Parameter& parameter)
    : Route(context, {&parameter}), whole_(context, parameter, /*planned=*/false) {}

// The gradient stays sparse, also on a rank that has none, or a dense one.
void SparseRoute::MakeSparse(Parameter& p) {
  at::NoGradGuard no_grad;
  at::Tensor& grad = p.tensor.mutable_grad();
  if (!grad.defined()) {
    std::vector<int64_t> no_rows = p.tensor.sizes().vec();
    no_rows[0] = 0;
    const auto options = GradOptions(p.tensor);
    grad = at::_sparse_coo_tensor_unsafe(at::empty({1, 0}, options.dtype(at::kLong)), at::empty(no_rows, options),
                                         p.tensor.sizes(), options.layout(at::kSparse), /*is_coalesced=*/true);
  } else if (!grad.is_sparse()) {
    grad = grad.to_sparse(1);
  }
}

void SparseRoute::Flush(Parameter& p) {
  const Membership& membership = *context_.membership;
  if (context_.options.uneven_steps && !membership.Known()) return;  // synchronize() waits for that, and comes again
  MakeSparse(p);
  sent_whole_ = membership.SomeRankIsMissing();
  if (sent_whole_) return whole_.Send();
  gathered_ = std::make_shared<Gathered>();
  // Not kept: it holds gathered_.
  const auto exchange = std::make_shared<SparseExchange>(context_.WireName("sparse", p.name), p.name, gathered_,
                                                         context_.options.process_set, context_.options.size);
  ThrowIfError(Catching("Cannot send the sparse gradient of " + p.name, [&] {
    at::NoGradGuard no_grad;
    const at::Tensor& grad = p.tensor.grad();
    gathered_->my_indices = grad._indices().transpose(0, 1).contiguous();
    gathered_->my_values = grad._values().contiguous();
    const Buffer values = ToBuffer(gathered_->my_values);
    if (SizeOf(values.dtype) == 0) {
      return Status::InvalidArgument(
          "The gradient of " + p.name + " has dtype " + c10::toString(grad.scalar_type()) +
          ", which cannot be reduced. Leave the parameter out of the optimizer or convert it.");
    }
    exchange->SetMessage(ToBuffer(gathered_->my_indices), values);
    return Status::OK();
  }));
  context_.Submit(exchange, members());
  p.counter.MarkSent();
}

Status SparseRoute::Finish(Parameter& p) {
  if (sent_whole_) return whole_.Finish(p);
  const std::shared_ptr<Gathered> gathered = std::exchange(gathered_, nullptr);
  if (!p.tensor.grad().defined()) return GradientRemoved(p.name);
  return Catching("Cannot put the reduced gradient of " + p.name + " into place", [&] {
    at::NoGradGuard no_grad;
    if (context_.options.reduction.op == ReduceOp::kAverage) gathered->values.div_(context_.options.size);
    at::Tensor& grad = p.tensor.mutable_grad();
    at::Tensor sum = at::sparse_coo_tensor(gathered->indices.transpose(0, 1), gathered->values, p.tensor.sizes());
    if (context_.options.compression == CompressionKind::kPython) sum = context_.Decompress(p, sum);
    if (grad.is_sparse()) {
      grad.zero_().add_(sum);
    } else {  // the user has made it dense meanwhile
      grad.copy_(sum.to_dense());
    }
    return Status::OK();
  });
}

// Every step makes its own exchange and memory.
std::shared_ptr<Route> SparseRoute::Successor() { return shared_from_this(); }

}  // namespace poseidon
