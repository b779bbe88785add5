// Runs one launch: reads it from standard input, runs the grid block by block, and writes the buffers to standard output.
//
// A block's threads are fibres. The scheduler resumes them one after another, in the requested order; each runs until it waits at a
// barrier or returns. So of two threads without a barrier between them, one is completely ahead of the other, and in another order
// behind it: if a barrier is missing, one of the orders gives wrong results. A thread that waits for ever is an error.

#include "cuda_host.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <ucontext.h>

extern char __start_cuda_shared __attribute__((weak)), __stop_cuda_shared __attribute__((weak));

namespace cuda_host {

constexpr size_t STACK = 64 * 1024, GUARD = 4096, VECTOR = 16;
enum Order { ASCENDING, DESCENDING, SHUFFLED };
enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, RETURNED };

using Place = void*[5];                                  // a jump buffer of __builtin_setjmp

struct Fibre {
    ucontext_t context;                                  // where the fibre starts
    Place place;                                         // where it continues
    bool started;
    char* stack;
    void* fake_stack;                                    // AddressSanitizer's
    State state;
    unsigned mask;                                       // mask of the warp barrier at which it waits
    uint3 thread;
};

struct Launch { const Kernel* kernel; dim3 grid, block; unsigned shared, order; std::vector<void*> args; };

Here here;
void* dynamic_shared;
Launch launch;
std::vector<Fibre> fibres;
std::vector<unsigned> order;                             // order in which the threads of a block run
std::mt19937 random_numbers(0);
unsigned running;
Place scheduler;
void* scheduler_fake_stack;
const void* scheduler_stack;
size_t scheduler_stack_size;
alignas(VECTOR) char slots[1024 / WARP][WARP][LARGEST_VALUE];

void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "cuda_host: %s, block (%u, %u, %u), thread (%u, %u, %u): ", launch.kernel ? launch.kernel->name : "no kernel",
            here.block.x, here.block.y, here.block.z, here.thread.x, here.thread.y, here.thread.z);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

unsigned lane() { return running % WARP; }
void* slot(unsigned lane) { return slots[running / WARP][lane]; }

// Jumps replace swapcontext, which makes a system call for the signal mask, and for which AddressSanitizer cleans the stack. They
// are separate functions, because the compiler assumes that a function that jumps never continues.
__attribute__((noipa)) void go(Place& to) { __builtin_longjmp(to, 1); }

__attribute__((noipa)) void enter(Fibre& fibre) {
    if (__builtin_setjmp(scheduler)) return;
    if (fibre.started) go(fibre.place);
    fibre.started = true;
    setcontext(&fibre.context);
}

__attribute__((noipa)) void leave(Fibre& fibre) {
    if (!__builtin_setjmp(fibre.place)) go(scheduler);
}

void to_scheduler(bool for_good) {
    Fibre& fibre = fibres[running];
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fibre.fake_stack, scheduler_stack, scheduler_stack_size);
    leave(fibre);
    __sanitizer_finish_switch_fiber(fibre.fake_stack, nullptr, nullptr);
}

void wait_for_block() {
    fibres[running].state = AT_BLOCK_BARRIER;
    to_scheduler(false);
}

void wait_for_warp(unsigned mask) {
    if (!(mask >> lane() & 1)) fail("lane %u is not in the mask %08x that it names", lane(), mask);
    fibres[running].state = AT_WARP_BARRIER;
    fibres[running].mask = mask;
    to_scheduler(false);
}

void thread_main() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
    launch.kernel->call(launch.args.data());
    fibres[running].state = RETURNED;
    to_scheduler(true);
}

void resume(unsigned index) {
    Fibre& fibre = fibres[running = index];
    here.thread = fibre.thread;
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fibre.stack, STACK);
    enter(fibre);
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}

void start(Fibre& fibre, unsigned index) {
    const dim3 size = launch.block;
    __asan_unpoison_memory_region(fibre.stack, STACK);
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack;
    fibre.context.uc_stack.ss_size = STACK;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, thread_main, 0);
    fibre.started = false;
    fibre.state = READY;
    fibre.fake_stack = nullptr;
    fibre.thread = {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

// Returns whether all threads named in the mask of thread `index` have arrived at its warp barrier.
bool warp_is_complete(unsigned index) {
    const unsigned first = index / WARP * WARP, mask = fibres[index].mask;
    for (unsigned i = first; i < std::min<size_t>(first + WARP, fibres.size()); ++i)
        if ((mask >> (i - first) & 1) && (fibres[i].state != AT_WARP_BARRIER || fibres[i].mask != mask)) return false;
    return true;
}

bool all(State state) {
    return std::all_of(fibres.begin(), fibres.end(), [=](const Fibre& fibre) { return fibre.state == state; });
}

// Makes the threads ready whose barrier is complete. Returns false if there are none.
bool release() {
    std::vector<Fibre*> released;
    for (unsigned i = 0; i < fibres.size(); ++i)
        if (fibres[i].state == AT_WARP_BARRIER && warp_is_complete(i)) released.push_back(&fibres[i]);
    if (all(AT_BLOCK_BARRIER))
        for (Fibre& fibre : fibres) released.push_back(&fibre);
    for (Fibre* fibre : released) fibre->state = READY;
    return !released.empty();
}

void arrange(std::vector<unsigned>& turns, size_t n) {
    turns.resize(n);
    std::iota(turns.begin(), turns.end(), 0);
    if (launch.order == DESCENDING) std::reverse(turns.begin(), turns.end());
    if (launch.order == SHUFFLED) std::shuffle(turns.begin(), turns.end(), random_numbers);
}

void poison(char* begin, char* end) {
    for (volatile char* at = begin; at != end; ++at) *at = static_cast<char>(0xff);        // NaN as a float
}

void run_block(unsigned index) {
    const dim3 grid = launch.grid;
    here.block = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
    poison(&__start_cuda_shared, &__stop_cuda_shared);
    poison(static_cast<char*>(dynamic_shared), static_cast<char*>(dynamic_shared) + launch.shared);
    for (unsigned i = 0; i < fibres.size(); ++i) start(fibres[i], i);
    do {
        arrange(order, fibres.size());
        for (unsigned i : order)
            if (fibres[i].state == READY) resume(i);
        if (all(RETURNED)) return;
    } while (release());
    const auto stuck = std::find_if(fibres.begin(), fibres.end(), [](const Fibre& fibre) { return fibre.state != RETURNED; });
    here.thread = stuck->thread;
    fail("waits at a %s barrier that others never reach", stuck->state == AT_BLOCK_BARRIER ? "block's" : "warp's");
}

// Returns a stack below which a page without access makes an overflow crash.
char* new_stack() {
    void* memory = mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD, PROT_NONE)) fail("there is no memory for the threads' stacks");
    return static_cast<char*>(memory) + GUARD;
}

void run_grid() {
    const dim3 size = launch.block, grid = launch.grid;
    const size_t threads = size_t(size.x) * size.y * size.z, blocks = size_t(grid.x) * grid.y * grid.z;
    if (threads < 1 || threads > 1024 || size.z > 64) fail("a block has 1 to 1024 threads, not %zu", threads);
    if (blocks < 1 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) fail("no grid has %zu blocks", blocks);
    here = {{}, {}, size, grid};
    dynamic_shared = aligned_alloc(VECTOR, (launch.shared + VECTOR - 1) / VECTOR * VECTOR);
    __asan_poison_memory_region(static_cast<char*>(dynamic_shared) + launch.shared, -launch.shared % VECTOR);
    fibres.resize(threads);
    for (Fibre& fibre : fibres) fibre.stack = new_stack();
    std::vector<unsigned> turns;
    arrange(turns, blocks);
    for (unsigned index : turns) run_block(index);
}

void read_bytes(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) fail("the launch is incomplete");
}

template <class T> T read_number() {
    T value;
    read_bytes(&value, sizeof value);
    return value;
}

std::string read_text() {
    std::string text(read_number<uint32_t>(), 0);
    read_bytes(text.data(), text.size());
    return text;
}

const Kernel* find_kernel(const std::string& name) {
    for (const Kernel* kernel = KERNELS; kernel->name; ++kernel)
        if (kernel->name == name) return kernel;
    fail("there is no kernel %s", name.c_str());
}

struct Buffer { char* data; size_t size; };
std::map<uint64_t, Buffer> buffers;                      // by the tensor's address, because a tensor may be several arguments

// Reads a tensor into a buffer of exactly its size, at the same offset from a multiple of 16; the bytes before it are poisoned.
Buffer read_buffer() {
    const auto address = read_number<uint64_t>(), size = read_number<uint64_t>();
    const size_t off = address % VECTOR;
    if (!buffers.count(address)) {
        char* memory = static_cast<char*>(malloc(off + size));
        __asan_poison_memory_region(memory, off / 8 * 8);
        buffers[address] = {memory + off, size};
    }
    const Buffer buffer = buffers[address];
    if (buffer.size != size) fail("two arguments overlap in part");
    read_bytes(buffer.data, size);
    return buffer;
}

// Returns the bytes of a kernel's argument. Appends the buffer of a pointer to `written`.
std::vector<char> read_argument(char type, unsigned size, std::vector<Buffer>& written) {
    std::vector<char> value(sizeof(void*));
    if (type != 'p') {
        read_bytes(value.data(), size);
        return value;
    }
    const auto item = read_number<uint32_t>();
    if (size % item) fail("a pointer to %u bytes was given a tensor of %u", size, item);
    written.push_back(read_buffer());
    memcpy(value.data(), &written.back().data, sizeof(void*));
    return value;
}

int main() {
    launch.kernel = find_kernel(read_text());
    for (dim3* size : {&launch.grid, &launch.block}) read_bytes(size, sizeof *size);
    launch.shared = read_number<uint32_t>();
    launch.order = read_number<uint32_t>();
    const std::string types = launch.kernel->types, given = read_text();
    if (given != types) fail("takes arguments of the types %s (p: pointer), was given %s", types.c_str(), given.c_str());
    std::vector<Buffer> written;
    std::vector<std::vector<char>> values;
    for (size_t i = 0; i < types.size(); ++i) values.push_back(read_argument(types[i], launch.kernel->sizes[i], written));
    for (auto& value : values) launch.args.push_back(value.data());
    run_grid();
    for (const Buffer& buffer : written) fwrite(buffer.data, 1, buffer.size, stdout);
    return fflush(stdout) ? 1 : 0;
}

}  // namespace cuda_host

int main() { return cuda_host::main(); }
