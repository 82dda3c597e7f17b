#include "torch/routes/grad_parts.h"

#include <algorithm>

namespace poseidon {

class GradParts::PartSource final : public DenseSource {
 public:
  PartSource(std::shared_ptr<GradParts> whole, int part) : whole_(std::move(whole)), part_(part) {}

  Status PrepareWire(Buffer* wire) override {
    const int64_t elements = whole_->whole_.elements();
    const int64_t length = (elements + whole_->parts_ - 1) / whole_->parts_;
    const int64_t begin = std::min(elements, part_ * length);
    const int64_t end = std::min(elements, begin + length);
    *wire = whole_->whole_;
    wire->data = static_cast<char*>(wire->data) + begin * SizeOf(wire->dtype);
    wire->shape = {end - begin};
    return Status::OK();
  }
  bool needs_restore() const override { return whole_->source_->needs_restore(); }
  // The last one to arrive brings the whole back.
  Status RestoreFromWire() override {
    return --whole_->under_way_ == 0 ? whole_->source_->RestoreFromWire() : Status::OK();
  }
  size_t gradients() const override { return part_ == 0 ? 1 : 0; }

 private:
  const std::shared_ptr<GradParts> whole_;
  const int64_t part_;
};

Status GradParts::Prepare() {
  under_way_ = parts_;
  return source_->PrepareWire(&whole_);
}

std::shared_ptr<DenseSource> GradParts::Part(int part) {
  return std::make_shared<PartSource>(shared_from_this(), part);
}

}  // namespace poseidon
