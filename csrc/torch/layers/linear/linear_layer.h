// A weight that linear calls use, and its bias. Its rows are (x, d): sufficient factors.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "torch/layers/factored_layer.h"

namespace poseidon {

class LinearLayer final : public FactoredLayer {
 public:
  LinearLayer(std::string name, at::Tensor weight, const WireFormat& wire, double scale);

  // ---- Step 0 (linear_profile.cc).
  // bias: the one the call used, undefined if none.
  void Profile(const at::Tensor& x, const at::Tensor& d, const at::Tensor& bias);
  void CheckWeight(const at::Tensor& grad) override;
  void CheckBias(const at::Tensor& grad) override;
  void FillProfile(TensorProfile* profile) const override;

  // Adds a call's rows to this step's message.
  void Append(const at::Tensor& x, const at::Tensor& d, int walk, bool last_pass);
  void KeepWalk(int walk) override;

  Status Rebuild(const Buffer& gathered, const bool add[2]) override;

 protected:
  std::shared_ptr<FactoredLayer> New() const override {
    return std::make_shared<LinearLayer>(name(), weight(), wire_format(), scale_);
  }
  FactorLayout LayoutFor(at::ScalarType wire_type) const override;
  void DropProfile() override;
  void SpillRows() override;
  void ForgetRows() override;
  void DropUnfinished() override;
  bool HoldsUnfinished() const override { return !calls_.empty() && !calls_.back().kept; }

 private:
  // Rows of the message that one call has appended, in order.
  struct Call {
    int walk = 0;
    int64_t rows = 0;
    bool kept = false;
  };
  std::vector<Call> calls_;

  at::Tensor probe_;           // random r (N)
  at::Tensor probe_sum_;       // sum of d^T (x r) (M)
  at::Tensor probe_scale_;     // sum of |d|^T |x r|: what cancellation is measured against
  at::Tensor bias_sum_;        // column sums of d
  bool bias_differs_ = false;  // between calls, or its gradient comes from elsewhere too
};

}  // namespace poseidon
