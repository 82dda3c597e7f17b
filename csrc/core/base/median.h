// The median of some measurements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace poseidon {

// Of an even number the mean of the middle two; of none 0.
inline double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace poseidon
