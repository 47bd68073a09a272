// Whatever is thrown becomes a code and a message.
#include "check.h"

using namespace lfmfast;

namespace {

template <typename E>
error_info seen(const E & e) {
    try {
        throw e;
    } catch (...) {
        return current_error();
    }
}

}  // namespace

int main() {
    const auto full = seen(error(error_code::context_full, "too long", 9, 8));
    CHECK_EQ(full.code, static_cast<int>(error_code::context_full));
    CHECK_EQ(full.message, "too long");
    CHECK_EQ(full.seen, 9);
    CHECK_EQ(full.limit, 8);
    CHECK_EQ(seen(std::bad_alloc()).code, static_cast<int>(error_code::out_of_memory));
    const auto other = seen(std::runtime_error("odd"));
    CHECK_EQ(other.code, static_cast<int>(error_code::internal));
    CHECK_EQ(other.message, "odd");
    CHECK_EQ(seen(42).code, static_cast<int>(error_code::internal));
    return check::failures != 0;
}
