#include "core/base/dtype.h"

#include <string>

#include "tests/check.h"

namespace poseidon {
namespace {

struct Expected {
  DType dtype;
  int64_t size;
  std::string name;
  bool floating;
};

TEST(SizesNamesAndKinds) {
  const std::vector<Expected> table = {
      {DType::kUInt8, 1, "uint8", false},      {DType::kInt8, 1, "int8", false},
      {DType::kInt16, 2, "int16", false},      {DType::kInt32, 4, "int32", false},
      {DType::kInt64, 8, "int64", false},      {DType::kFloat16, 2, "float16", true},
      {DType::kBFloat16, 2, "bfloat16", true}, {DType::kFloat32, 4, "float32", true},
      {DType::kFloat64, 8, "float64", true},   {DType::kOther, 0, "other", false},
  };
  POSEIDON_CHECK_EQ(table.size(), static_cast<size_t>(DType::kOther) + 1);
  for (const Expected& row : table) {
    POSEIDON_CHECK_EQ(SizeOf(row.dtype), row.size);
    POSEIDON_CHECK_EQ(std::string(Name(row.dtype)), row.name);
    POSEIDON_CHECK_EQ(IsFloating(row.dtype), row.floating);
  }
}

// The values travel between ranks.
TEST(ValuesAreFixed) {
  POSEIDON_CHECK_EQ(static_cast<int>(DType::kUInt8), 0);
  POSEIDON_CHECK_EQ(static_cast<int>(DType::kFloat16), 5);
  POSEIDON_CHECK_EQ(static_cast<int>(DType::kOther), 9);
}

}  // namespace
}  // namespace poseidon
