#include "core/schemes/rule.h"

#include <cstdio>

namespace poseidon {

std::string SchemeRule::ReasonByBytes(const MergedTensor& tensor, const Setting& setting, double otherwise) const {
  char text[96];
  std::snprintf(text, sizeof(text), "bytes: %.3g MB sent against %.3g MB",
                SentBytes(WorkOf(tensor, LayerCost{}, setting), setting.size) / 1e6, otherwise / 1e6);
  return text;
}

}  // namespace poseidon
