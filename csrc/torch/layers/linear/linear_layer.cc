#include "torch/layers/linear/linear_layer.h"

#include <algorithm>
#include <utility>

#include "torch/catching.h"
#include "torch/layers/factor_kernels.h"
#include "torch/routes/grad_place.h"

namespace poseidon {

LinearLayer::LinearLayer(std::string name, at::Tensor weight, const WireFormat& wire, double scale)
    : FactoredLayer(Kind::kLinear, std::move(name), std::move(weight), wire, scale) {
  layout_ = {this->weight().size(1), this->weight().size(0)};
}

FactorLayout LinearLayer::LayoutFor(at::ScalarType) const { return layout_; }

void LinearLayer::DropProfile() { probe_ = probe_sum_ = probe_scale_ = bias_sum_ = at::Tensor(); }

void LinearLayer::Append(const at::Tensor& x, const at::Tensor& d, int walk, bool last_pass) {
  at::NoGradGuard no_grad;
  BeginAppend(walk, last_pass);
  const Clock::time_point begin = Clock::now();
  Reserve(rows_ + x.size(0));
  PackRows(x, d, layout(), rows_, message_);
  rows_ += x.size(0);
  calls_.push_back({walk, x.size(0)});
  pack_seconds_ += SecondsBetween(begin, Clock::now());
}

void LinearLayer::KeepWalk(int walk) {
  for (auto call = calls_.rbegin(); call != calls_.rend() && !call->kept; ++call) call->kept = call->walk == walk;
}

void LinearLayer::ForgetRows() {
  FactoredLayer::ForgetRows();
  calls_.clear();
}

void LinearLayer::DropUnfinished() {
  if (std::all_of(calls_.begin(), calls_.end(), [](const Call& call) { return call.kept; })) return;
  int64_t from = 0, to = 0;
  for (const Call& call : calls_) {
    if (call.kept) {
      // Row by row would be slower, and overlapping rows must go through a copy.
      if (from != to) message_.narrow(0, to, call.rows).copy_(message_.narrow(0, from, call.rows).clone());
      to += call.rows;
    }
    from += call.rows;
  }
  rows_ = to;
  calls_.erase(std::remove_if(calls_.begin(), calls_.end(), [](const Call& call) { return !call.kept; }), calls_.end());
}

void LinearLayer::SpillRows() {
  const at::Tensor rows = message_.narrow(0, 0, rows_);
  ForgetRows();
  for (Part part : {kWeight, kBias}) {
    Target& t = target(part);
    if (!t.param.defined()) continue;
    at::Tensor& grad = t.param.mutable_grad();
    const bool add = grad.defined();
    at::Tensor local = at::empty(t.param.sizes(), GradOptions(t.param));
    part == kWeight ? RebuildWeight(rows, layout(), /*scale=*/1.0, /*add=*/false, local)
                    : RebuildBias(rows, layout(), /*scale=*/1.0, /*add=*/false, local);
    if (add) {
      grad.add_(local);
    } else {
      grad = local;
    }
  }
}

Status LinearLayer::Rebuild(const Buffer&, const bool add[2]) {
  return Catching("Cannot rebuild the gradient of " + name() + " from its factors", [&] {
    UseThreadsOfTorch();
    RebuildWeight(gathered_, layout(), scale_, add[kWeight], target(kWeight).result);
    if (has_bias()) RebuildBias(gathered_, layout(), scale_, add[kBias], target(kBias).result);
    return Status::OK();
  });
}

}  // namespace poseidon
